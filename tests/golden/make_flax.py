"""Script that writes flax/ beside this file: tiny models saved by transformers 4, Flax, optax and EasyLM.

Run it by hand in a separate environment with `transformers==4.55.*`, `torch`, `flax` and `msgpack`, since prep's tests
need transformers 5: `python -m tests.golden.make_flax`. Each model has `hf/` (safetensors, the reference) and `flax/`
(flax_model.msgpack). LLaMA also has `sharded/` and files of EasyLM's tree; transposes and the rotary order are those of
EasyLM's converter.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "flax"
NEO = {
    "vocab_size": 53,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
}
GPT2 = {"vocab_size": 53, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 12}
LLAMA = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
GPTJ = {
    "vocab_size": 53,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 24,
    "n_positions": 12,
    "rotary_dim": 4,
}
OPT = {
    "vocab_size": 53,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "max_position_embeddings": 12,
    "word_embed_proj_dim": 8,
}
T5 = {
    "vocab_size": 53,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}
BLOOM = {"vocab_size": 53, "hidden_size": 16, "n_layer": 2, "n_head": 2}
XGLM = {
    "vocab_size": 53,
    "d_model": 16,
    "ffn_dim": 24,
    "num_layers": 2,
    "attention_heads": 2,
    "max_position_embeddings": 12,
}
MT5 = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MISTRAL = LLAMA | {"sliding_window": 4}
GEMMA = LLAMA | {"head_dim": 8}
# Flax stores arrays above this size in chunks. Its own limit is 1 GiB.
CHUNK_NBYTES = 600
Tree = dict[str, Any]


def main() -> None:
    """Write all files."""
    import torch

    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(0)
    write_hf("neo", "gpt_neo", NEO, torch.bfloat16)
    llama = write_hf("llama", "llama", LLAMA, torch.float32)
    write_easylm(
        FOLDER / "llama", {name: tensor.numpy() for name, tensor in llama.state_dict().items()}
    )
    write_hf("gpt2", "gpt2", GPT2, torch.float16)
    write_hf("gptj", "gptj", GPTJ, torch.float32)
    write_hf("opt", "opt", OPT, torch.float16)
    write_hf("mistral", "mistral", MISTRAL, torch.bfloat16)
    write_hf("gemma", "gemma", GEMMA, torch.bfloat16)
    old_clip()
    write_hf("t5", "t5", T5, torch.float32)
    write_hf("t5-gated", "t5", MT5, torch.bfloat16)
    write_hf("bloom", "bloom", BLOOM, torch.bfloat16)
    write_hf("xglm", "xglm", XGLM, torch.float16)
    write_hf("mt5", "mt5", MT5, torch.float32)


def old_clip() -> None:
    """Let `jnp.clip` accept its old keyword names, which T5's Flax class uses."""
    import jax.numpy as jnp

    new = jnp.clip
    jnp.clip = lambda x, a_min=None, a_max=None: new(x, a_min, a_max)


def write_hf(name: str, family: str, config: Tree, dtype: Any) -> Any:
    """Save a model with torch and with Flax, in one file and in several; return torch's model."""
    import torch
    import transformers as hf

    kind = "AutoModelForSeq2SeqLM" if family in ("t5", "mt5") else "AutoModelForCausalLM"
    model = getattr(hf, kind).from_config(hf.AutoConfig.for_model(family, **config)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float32) * 0.3)
    model.save_pretrained(FOLDER / name / "hf")
    flax_model = getattr(hf, f"Flax{kind}").from_pretrained(FOLDER / name / "hf")
    flax_model.save_pretrained(FOLDER / name / "flax")
    if name == "llama":
        flax_model.save_pretrained(FOLDER / name / "sharded", max_shard_size="8KB")
        (FOLDER / name / "flax" / "generation_config.json").unlink()
    (FOLDER / name / "hf" / "generation_config.json").unlink()
    return model


def write_easylm(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Write one model as EasyLM's streams and Flax files: params, train state, stacked layers, boxed, in chunks."""
    import jax
    import numpy as np
    import optax
    from flax import serialization
    from flax.core import meta
    from flax.training.train_state import TrainState

    params = jax.tree.map(np.ascontiguousarray, easylm_tree(tensors))
    write_stream(folder / "streaming_params", params)
    variables = {"params": params}
    state = TrainState.create(apply_fn=print, params=variables, tx=optax.adamw(1e-3))
    write_stream(folder / "streaming_train_state", state)
    for axis in (0, 1):
        write_stream(
            folder / f"stacked_{axis}",
            stacked(
                params,
                lambda leaves, a=axis: np.stack(leaves, a if leaves[0].ndim > 1 else min(a, 1)),
            ),
        )
    (folder / "flax_params.msgpack").write_bytes(serialization.to_bytes(variables))
    boxed = jax.tree.map(lambda leaf: meta.Partitioned(leaf, ("x",) * leaf.ndim), params)
    (folder / "boxed.msgpack").write_bytes(serialization.to_bytes(boxed))
    default_size, serialization.MAX_CHUNK_SIZE = serialization.MAX_CHUNK_SIZE, CHUNK_NBYTES
    (folder / "pieces.msgpack").write_bytes(serialization.to_bytes(variables))
    write_stream(folder / "streaming_pieces", params)
    (folder / "train_state.msgpack").write_bytes(
        serialization.to_bytes({"step": 7, "params": params, "opt_state": {"mu": params}})
    )
    serialization.MAX_CHUNK_SIZE = default_size


def easylm_tree(tensors: Mapping[str, Any]) -> Tree:
    """Build EasyLM's tree in the way of its convert_hf_to_easylm."""

    def interleaved(weight: Any, heads: int) -> Any:
        out, inner = weight.shape
        return (
            weight.reshape(heads, 2, out // heads // 2, inner)
            .transpose(0, 2, 1, 3)
            .reshape(out, inner)
        )

    def layer(prefix: str) -> Tree:
        q, k, v, o = (tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkvo")
        gate, up, down = (
            tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return {
            "attention": {
                "wq": {"kernel": interleaved(q, LLAMA["num_attention_heads"]).T},
                "wk": {"kernel": interleaved(k, LLAMA["num_key_value_heads"]).T},
                "wv": {"kernel": v.T},
                "wo": {"kernel": o.T},
            },
            "feed_forward": {
                "w1": {"kernel": gate.T},
                "w2": {"kernel": down.T},
                "w3": {"kernel": up.T},
            },
            "attention_norm": {"kernel": tensors[f"{prefix}.input_layernorm.weight"]},
            "ffn_norm": {"kernel": tensors[f"{prefix}.post_attention_layernorm.weight"]},
        }

    layers = {str(i): layer(f"model.layers.{i}") for i in range(LLAMA["num_hidden_layers"])}
    wte, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    transformer = {"wte": {"embedding": wte}, "ln_f": {"kernel": norm}, "h": layers}
    return {"transformer": transformer, "lm_head": {"kernel": tensors["lm_head.weight"].T}}


def stacked(params: Tree, stack: Callable[[list[Any]], Any]) -> Tree:
    """Return the tree with its layers stacked, as EasyLM does with `scan_layers`."""
    import jax

    layers = params["transformer"]["h"]
    stacked_layers = jax.tree.map(
        lambda *leaves: stack(list(leaves)), *(layers[str(i)] for i in range(len(layers)))
    )
    return params | {"transformer": params["transformer"] | {"h": {"scan_decoder": stacked_layers}}}


def write_stream(path: Path, tree: Any) -> None:
    """Write a stream in the way of EasyLM's StreamingCheckpointer.save_train_state_to_file."""
    import msgpack
    from flax.serialization import to_bytes, to_state_dict
    from flax.traverse_util import flatten_dict

    packer = msgpack.Packer()
    with path.open("wb") as file:
        for key, value in flatten_dict(to_state_dict(tree)).items():
            file.write(packer.pack((key, to_bytes(value))))


if __name__ == "__main__":
    main()
