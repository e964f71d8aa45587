"""Script that writes architectures/*.json beside this file: configs and tensors of models without a family.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_architectures [TYPE ...]`. A file has the
config.json of a tiny model of transformers, and the dtype and shape of each tensor that `save_pretrained` writes by
their published names. Tests fill them with random values, and need neither torch nor transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.later_configs import GEMMA4

FOLDER = Path(__file__).parent / "architectures"
# Mixtures of experts, latent attention, state spaces, linear attention, an encoder and decoder, and towers.
TYPES = (
    "bart",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
    "kimi_k25",
    "llama4",
    "mamba2",
    "qwen3_next",
)
MAX_PARAMETERS = 250_000_000
WIDTH = 64
# Tiny value -> config fields of transformers with this meaning.
_SMALL_VALUES: tuple[tuple[int, str], ...] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim model_dim n_embed word_embed_proj_dim embed_dim hidden_dim embedding_size"
        " width attention_hidden_size lru_width out_hidden_size projection_dim vision_embed_dim emb_dim"
        " text_hidden_size",
    ),
    (
        96,
        "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim mlp_hidden_size"
        " intermediate_dim block_ff_dim feed_forward_size intermediate_size_mlp projector_input_dim"
        " projector_output_dim vision_output_dim",
    ),
    (
        4,
        "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers"
        " num_encoder_layers depth num_blocks num_attention_heads n_head num_heads n_heads encoder_attention_heads"
        " decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"
        " ffn_num_experts moe_n_experts conv_kernel linear_num_value_heads index_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads n_kv_heads attention_num_key_value_heads num_experts_per_tok moe_k moe_topk"
        " num_experts_per_token top_k_experts moe_top_k moe_router_topk moe_num_active_primary_experts expand"
        " mamba_expand n_mamba_heads linear_num_key_heads num_kv_shared_layers eos_token_id"
        " decoder_start_token_id",
    ),
    (
        16,
        "head_dim d_kv attention_head_dim global_head_dim kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
        " mamba_d_state mamba_d_head mamba_head_dim ssm_state_size state_size linear_key_head_dim linear_value_head_dim"
        " hidden_size_per_layer_input sliding_window index_head_dim num_mel_bins",
    ),
    (
        128,
        "vocab_size true_vocab_size unpadded_vocab_size vocab_size_per_layer_input encoder_vocab_size"
        " decoder_vocab_size"
        " max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len"
        " max_sequence_length seq_length model_max_length mamba_d_ssm",
    ),
    (
        32,
        "moe_intermediate_size expert_intermediate_size shared_expert_intermediate_size"
        " moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size"
        " q_lora_rank attention_chunk_size image_size",
    ),
    (
        1,
        "n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts moe_num_shared_experts n_groups"
        " mamba_n_groups bos_token_id",
    ),
    (
        8,
        "mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank laurel_rank index_topk patch_size",
    ),
    (0, "pad_token_id"),
    (3, "image_token_id image_token_index"),
    (5, "video_token_id video_token_index"),
    (6, "vision_start_token_id audio_token_id audio_token_index"),
    (7, "vision_end_token_id"),
)
SMALL_VALUES = {field: value for value, fields in _SMALL_VALUES for field in fields.split()}
# Lists with an entry per layer, left to the defaults of the config class.
PER_LAYER_FIELDS = {
    *("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "moe_layers"),
    *("hybrid_override_pattern", "attn_layer_indices", "hybrid_layer_ids", "full_attn_idxs"),
    *("attention_layers", "layers_types", "attn_type_list", "moe_layer_freq", "block_types"),
    *("layer_block_types", "deepstack_visual_indexes", "fullatt_block_indexes"),
    *("per_layer_config", "num_attention_heads_per_layer", "ffn_multipliers", "num_query_heads"),
    *("activation_sparsity_pattern", "indexer_types", "mtp_layer_types", "kv_source_layers"),
}
WRITTEN_FIELDS = {
    *("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"),
    "model_type",
}
# Ends of the names of sections.
SECTION_ENDS = ("_config", "encoder", "decoder")
DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# Changes of the sizes of Gemma 4's text part, which a mesh does not divide.
EVEN_SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
}
TOWER_TOKENS = [
    f"{name}_token_id" for name in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
]
GEMMA4_VISION = {
    **{
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
}
# Sizes of a type that the rules above make inconsistent.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {}, "head_dim": 32},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": DEFAULT_ROPE}},
    "emu3": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 8}},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "hunyuan_vl_text": {"head_dim": 16},
    "cosmos3_edge_text": {"rope_parameters": DEFAULT_ROPE | {"mrope_section": [4, 2, 2]}},
    "hy_v4_vl_text": {"rope_parameters": DEFAULT_ROPE | {"mrope_section": [4, 2, 2]}},
    "granite4_vision": {"deepstack_layer_map": [[1, 0]], "downsample_rate": "1/2"},
    "gemma4": {
        "text_config": GEMMA4 | EVEN_SIZES,
        "vision_config": GEMMA4_VISION,
        "audio_config": None,
        **dict.fromkeys(TOWER_TOKENS, 1),
    },
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"] * 2,
    },
    "xlm": {"n_words": 128, "n_layers": 4, "n_heads": 4},
    "xlnet": {"d_head": 16, "d_inner": 96},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "layer_types": ["linear_attention", "hybrid"] * 2,
    },
}


def model_types() -> list[str]:
    """Return the types of transformers with a head for text."""
    from transformers.models.auto import modeling_auto

    mappings = (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    )
    names: dict[str, None] = {}
    for mapping in mappings:
        names |= dict.fromkeys(getattr(modeling_auto, mapping, {}))
    return list(names)


def make_model(model_type: str) -> Any:
    """Return a tiny model of a type, with random values.

    Raises:
        ValueError: The model is not small, or transformers has no class with a head for it.
    """
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    fields = _shrink(config_class().to_dict()) | dict(CHANGES.get(model_type, {}))
    config = config_class(**fields)
    model_class = _model_class(config)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{model_type} has {num_parameters:,} parameters")
    torch.manual_seed(0)
    return model_class(config)


def _shrink(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with tiny sizes, in its sections as well."""
    shrunk: dict[str, Any] = {}
    for name, value in fields.items():
        if name in WRITTEN_FIELDS or (name in PER_LAYER_FIELDS and not isinstance(value, int)):
            continue
        if isinstance(value, dict) and name.endswith(SECTION_ENDS):
            section: dict[str, Any] = dict(value)
            shrunk[name] = _shrink(section)
            if "model_type" in section:
                shrunk[name]["model_type"] = section["model_type"]
                shrunk[name] |= CHANGES.get(section["model_type"], {})
        elif name in SMALL_VALUES and isinstance(value, int | float) and value is not True:
            shrunk[name] = SMALL_VALUES[name]
        else:
            shrunk[name] = value
    return shrunk


def _model_class(config: Any) -> Any:
    """Return the class of transformers that generates text with this config."""
    import transformers

    for name in (
        "AutoModelForImageTextToText",
        "AutoModelForMultimodalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForCausalLM",
    ):
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", {})
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"no class generates text with {type(config).__name__}")


def read_header(path: Path) -> dict[str, Any]:
    """Return the entries of a safetensors header, without its metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


def describe(model_type: str) -> dict[str, Any]:
    """Return the config and the types of the tensors of a tiny model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(model_type).save_pretrained(folder)
        tensors: dict[str, Any] = {}
        for tensor, entry in read_header(folder / "model.safetensors").items():
            tensors[tensor] = [entry["dtype"], entry["shape"]]
        return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors}


def main(types: list[str]) -> None:
    """Write the files of these types."""
    FOLDER.mkdir(exist_ok=True)
    for model_type in types:
        text = json.dumps(describe(model_type), separators=(",", ":"))
        (FOLDER / f"{model_type}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(TYPES))
