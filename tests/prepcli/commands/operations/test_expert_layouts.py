"""Experts as files on the hub store them, and exports under the names of their model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from prepcli.core.errors import FAILED
from tests.helpers.damage import flip_bit, tensor_place
from tests.helpers.fused_experts import fuse_experts
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GROUPED_QUERY, assert_same, make_checkpoint, read_tensors

torch = lazy_module("torch")
transformers = lazy_module("transformers")
LOGITS_ATOL = 2e-5
TOKENS = [1, 5, 9, 20, 33, 2, 7]
WIDTH = 32
TEXT = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model class of transformers 5, and the layout of its files on the hub.

    Attributes:
        model: Name of the class without `Config` and the head.
        fields: Fields of its config.
        to_hub: Returns the tensors of a file from those of the class.
    """

    model: str
    fields: Mapping[str, Any]
    to_hub: Callable[[Tensors], Tensors]


def split_experts(module: str, gate: str, up: str, down: str) -> Callable[[Tensors], Tensors]:
    """Return a function that splits fused experts, `MODULE.experts.gate_up_proj`, into one matrix per expert."""

    def to_hub(tensors: Tensors) -> Tensors:
        split: Tensors = {}
        for name, values in tensors.items():
            start = name.partition(".mlp.")[0].partition(".feed_forward.")[0]
            expert = f"{start}.{module}.experts"
            if name.endswith("experts.gate_up_proj"):
                half = values.shape[1] // 2
                for number, matrix in enumerate(values):
                    split[f"{expert}.{number}.{gate}.weight"] = matrix[:half]
                    split[f"{expert}.{number}.{up}.weight"] = matrix[half:]
            elif name.endswith("experts.down_proj"):
                for number, matrix in enumerate(values):
                    split[f"{expert}.{number}.{down}.weight"] = matrix
            elif name.endswith(".mlp.gate.weight"):
                split[f"{start}.{module}.gate.weight"] = values
            else:
                split[name] = values
        return split

    return to_hub


def transposed(tensors: Tensors) -> Tensors:
    """Return tensors with the experts of files of Qwen3-VL-MoE: [experts, embed, 2 mlp] and [experts, mlp, embed]."""
    return {
        name: values.swapaxes(1, 2) if ".experts." in name else values
        for name, values in tensors.items()
    }


def granite(tensors: Tensors) -> Tensors:
    names = {
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "router.weight": "router.layer.weight",
    }
    renamed: Tensors = {}
    for name, values in tensors.items():
        for new, old in names.items():
            name = name.replace(f"block_sparse_moe.{new}", f"block_sparse_moe.{old}")
        renamed[name] = values
    return renamed


def qwen3_vl_moe(mlp: int) -> dict[str, Any]:
    """Return the config of a Qwen3-VL-MoE. With an MLP of 16 or 32, a tensor of its experts is square."""
    text = {
        **TEXT,
        "moe_intermediate_size": mlp,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "rope_parameters": MROPE,
    }
    tokens = {f"{name}_token_id": 60 + number for number, name in enumerate(("image", "video"))}
    tokens |= {"vision_start_token_id": 62, "vision_end_token_id": 63}
    return {"text_config": text, "vision_config": VISION, **tokens}


SEPARATE = split_experts("mlp", "gate_proj", "up_proj", "down_proj")
MOE = {**TEXT, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
CASES = {
    "separate": Case("Qwen3Moe", MOE, SEPARATE),
    "separate w1": Case(
        "Mixtral",
        {**TEXT, "num_local_experts": 4},
        split_experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "separate, shared": Case(
        "DeepseekV3",
        {
            **TEXT,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
        SEPARATE,
    ),
    **{f"fused {mlp}": Case("Qwen3VLMoe", qwen3_vl_moe(mlp), dict) for mlp in (24, 16, 32)},
    **{
        f"transposed {mlp}": Case("Qwen3VLMoe", qwen3_vl_moe(mlp), transposed)
        for mlp in (24, 16, 32)
    },
    # The down matrices of the published models are square.
    "interleaved": Case("GptOss", {**TEXT, "num_local_experts": 4, "intermediate_size": WIDTH}, dict),
    "transposed, Llama 4": Case(
        "Llama4Text",
        {**TEXT, "num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 40},
        dict,
    ),
    "fused, Granite": Case("GraniteMoe", {**TEXT, "num_local_experts": 4}, granite),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _work_dir(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_model(case: Case) -> np.ndarray:
    """Write a folder `m` in the layout of the hub, and return the logits of TOKENS."""
    config = getattr(transformers, f"{case.model}Config")(**case.fields)
    head = "ForConditionalGeneration" if "vision_config" in case.fields else "ForCausalLM"
    torch.manual_seed(0)
    # The class of Llama4TextConfig is Llama4ForCausalLM.
    model_class = getattr(transformers, case.model.removesuffix("Text") + head)
    model = model_class(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    Path("m").mkdir()
    config.architectures = [model_class.__name__]
    config.save_pretrained("m")
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    hub = {name: np.ascontiguousarray(values) for name, values in case.to_hub(tensors).items()}
    save_file(hub, "m/model.safetensors", {"format": "pt"})
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()


def prep_logits(init: str) -> np.ndarray:
    """Return the logits of TOKENS of an init."""
    config = json.loads(Path(init, "prep-manifest.json").read_text())["config"]
    tokens = np.array([TOKENS], np.int32)
    return model_logits(tiny_transformer(config).model, prep.load_params(init), {"tokens": tokens})[
        0
    ]


@pytest.mark.parametrize("name", slow_except(list(CASES), ["transposed 16"]))
def test_experts_of_the_hub_have_the_logits_of_transformers(name: str):
    expected = make_model(CASES[name])
    run_ok("save-init", "./m", "--no-verbatim", "--mesh", "1,2,2")
    np.testing.assert_allclose(prep_logits("m-init"), expected, rtol=0, atol=LOGITS_ATOL)
    run_ok("export", "m-init", "--out", "back")
    stored, back = (load_file(f"{folder}/model.safetensors") for folder in ("m", "back"))
    assert stored.keys() == back.keys()
    assert all(np.array_equal(back[tensor], values) for tensor, values in stored.items())
    run_ok("verify", "back", "./m")
    run_ok("inspect", "./m", "--tree")


@pytest.mark.parametrize("mlp", slow_except([24, 16, 32], [16]))
def test_text_only_writes_experts_as_the_text_class_reads_them(mlp: int):
    expected = make_model(CASES[f"transposed {mlp}"])
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--text-only", "--out", "text")
    run_ok("export", "./m", "--text-only", "--out", "text-of-folder")
    run_ok("verify", "text")
    first, second = (load_file(f"{path}/model.safetensors") for path in ("text", "text-of-folder"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(second[name], values) for name, values in first.items())
    model = transformers.AutoModelForCausalLM.from_pretrained("text").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=LOGITS_ATOL)


def test_text_only_compares_digests_of_transposed_experts(capsys: Capture):
    make_model(CASES["transposed 24"])
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "back")
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    path, low, _ = tensor_place(Path("back"), name)
    flip_bit(path, low)
    capsys.readouterr()
    lines = error_lines(capsys, "export", "./back", "--text-only", "--out", "text")
    assert lines[0].endswith("is damaged")
    assert "gate_up_proj" in lines[0]
    assert not Path("text").exists()


def test_transposed_experts_of_another_family_are_refused(capsys: Capture):
    """No published file of DeepSeek-V3 has fused experts with other dims: the order of gate and up is unknown."""
    case = CASES["separate, shared"]
    make_model(Case(case.model, case.fields, transposed))
    lines = error_lines(capsys, "save-init", "./m")
    assert "gate_up_proj has shape [4, 32, 48], expected [4, 48, 32]" in lines[1]
    hint = " hint: `prep save-init --map FILE` reads tensors with another order of dims"
    assert lines[2].startswith(hint)
    assert not Path("m-init").exists()


def test_transposed_experts_of_one_tensor_are_refused(capsys: Capture):
    make_model(CASES["fused 24"])
    path = Path("m/model.safetensors")
    tensors = load_file(path)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, path)
    lines = error_lines(capsys, "save-init", "./m")
    assert f"{name} has shape [4, 24, 32], expected [4, 32, 24]" in lines[1]


# Exports for other libraries have digests under the names of their model: without prefix, or with fused experts


LLAMA = GROUPED_QUERY | {"model_type": "llama", "tie_word_embeddings": True}
NUM_EXPERTS = 3
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": GROUPED_QUERY | {"model_type": "mixtral", "num_local_experts": NUM_EXPERTS},
    "qwen3_moe": GROUPED_QUERY
    | {
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}


def write_base_model() -> dict[str, np.ndarray]:
    """Write a LLaMA without head to the folder `model`. Its names have no prefix."""
    tensors = make_checkpoint(Path("whole"), LLAMA, "bfloat16", tied=True)
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return write_model(base)


def write_fused_experts(model_type: str) -> dict[str, np.ndarray]:
    """Write a model to the folder `model` with one tensor for the gate and up matrices of all experts of a layer."""
    tensors = make_checkpoint(Path("whole"), EXPERT_MODELS[model_type], "bfloat16")
    return write_model(fuse_experts(tensors, model_type))


def write_model(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write tensors and the config of the folder `whole` to the folder `model`."""
    Path("model").mkdir()
    shutil.copy("whole/config.json", "model")
    save_file(tensors, "model/model.safetensors")
    return tensors


# Layout, and the model whose experts are fused, or none for a base model
RETURNING = [
    ("easylm", None),
    ("levanter", None),
    ("torchtitan", None),
    ("maxtext", "mixtral"),
    ("torchtitan", "qwen3_moe"),
]


@pytest.mark.parametrize(("layout", "model_type"), slow_except(RETURNING, RETURNING[1:4]))
def test_foreign_names_have_digests_and_return(layout: str, model_type: str | None):
    tensors = write_base_model() if model_type is None else write_fused_experts(model_type)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    assert prep.verify("out")
    assert prep.verify("out", "./model")
    run_ok("export", "out", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_damage_of_a_base_model_stops_the_way_back(capsys: Capture):
    tensors = write_base_model()
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    data = max(Path("out/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[content.index(tensors["norm.weight"].tobytes())] ^= 1
    data.write_bytes(content)
    assert main(["save-init", "out", "--out", "init", "-q"]) == FAILED
    assert "norm.weight in out is damaged" in capsys.readouterr().err
    assert not Path("init").exists()
