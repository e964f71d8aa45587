"""State dicts of torchtitan: loaded by torch, and read back without a changed bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.core.errors import DamagedError
from tests.helpers.dcp_shards import save_sharded
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.torchtitan_states import ZERO_BIASES, torchtitan_state
from tests.helpers.way_back import check_way_back

torch = lazy_module("torch")
dcp = lazy_module("torch.distributed.checkpoint")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED_QUERY | {"model_type": "llama"},
    "qwen3": GROUPED_QUERY | {"model_type": "qwen3"},
    "qwen3_moe": GROUPED_QUERY | {"model_type": "qwen3_moe"} | EXPERTS,
    "deepseek_v3": FAMILY_CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3"},
    # No dense layers. Moonlight is an example of a model without a latent of queries.
    "deepseek_v3-sparse": FAMILY_CONFIGS["deepseek_v3"]
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 0, "q_lora_rank": None},
    "gpt_oss": FAMILY_CONFIGS["gpt_oss"] | {"model_type": "gpt_oss"},
}
LLAMA = MODELS["llama"]


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_state(folder: str, state: dict[str, Any]) -> None:
    """Save a state dict with torch, in one process."""
    dcp.save({name: as_tensor(value) for name, value in state.items()}, checkpoint_id=folder)


def as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def load_state(folder: str, expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Load tensors of the names and shapes in `expected` with torch."""
    state = {name: torch.full(value.shape, torch.nan) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=folder)
    return {name: value.numpy() for name, value in state.items()}


@pytest.mark.parametrize("model", MODELS)
def test_torch_loads_the_state_dict(model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model])
    run_ok("save-init", "./model", "--out", "init", "--pad-vocab", "8")
    run_ok("export", "init", "--layout", "torchtitan", "--out", "out")
    state = torchtitan_state(tensors, MODELS[model])
    assert_same(load_state("out", state), state)
    names = dcp.FileSystemReader("out").read_metadata().state_dict_metadata
    assert names.keys() == state.keys()


@pytest.mark.parametrize("model", MODELS)
def test_export_for_torchtitan_returns_every_bit(model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model], "bfloat16")
    words = ("--layout", "torchtitan", "--shard-size", "30000B", "--out", "out")
    run_ok("export", "./model", *words)
    assert len([*Path("out").glob("*.distcp")]) > 1
    check_way_back(tensors)


@pytest.mark.parametrize("model", MODELS)
def test_training_state_of_torchtitan_converts(model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model])
    state: dict[str, Any] = dict(torchtitan_state(tensors, MODELS[model]))
    if model in ZERO_BIASES:
        # Training has changed the buffer.
        state["layers.0.moe.expert_bias_E"] += 1
    state["optimizer"] = {"state": {"norm.weight": {"exp_avg": torch.zeros(64)}}}
    state["train_state"] = {"step": torch.tensor(3)}
    save_state("step-3", state)
    run_ok("save-init", "./step-3", "--config", "./model", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_damaged_buffer_of_experts_is_found():
    make_checkpoint(Path("model"), MODELS["gpt_oss"])
    run_ok("export", "./model", "--layout", "torchtitan", "--out", "out")
    assert prep.verify("out")
    # The last file has the buffers.
    path = max(Path("out").glob("*.distcp"))
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes(12), bytes(11) + b"\1", 1))
    assert path.read_bytes() != content
    with pytest.raises(DamagedError, match="is damaged"):
        prep.verify("out")


def test_deepseek_with_separated_rotary_pairs_is_refused(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), MODELS["deepseek_v3"], rope_interleave=False)
    lines = error_lines(capsys, "export", "./model", "--layout", "torchtitan", "--out", "out")
    assert "the layout has no place for model.layers.0.self_attn.kv_a_proj" in " ".join(lines)


def test_names_of_meta_are_read():
    tensors = make_checkpoint(Path("model"), LLAMA)
    state = torchtitan_state(tensors, LLAMA)
    earlier = {
        name.replace("qkv_linear.", "").replace("lm_head", "output"): value
        for name, value in state.items()
    }
    save_state("step-3", earlier)
    run_ok("export", "./step-3", "--config", "./model", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_tied_head_is_stored_under_both_names():
    tensors = make_checkpoint(Path("model"), MODELS["qwen3"], tied=True)
    run_ok("export", "./model", "--layout", "torchtitan", "--out", "out")
    state = torchtitan_state(tensors, MODELS["qwen3"])
    assert_same(load_state("out", state), state)
    run_ok("export", "out", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_parameters_of_the_state_are_counted(capsys: pytest.CaptureFixture[str]):
    tensors = make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", "torchtitan", "--out", "out")
    run_ok("inspect", "out")
    count = sum(tensor.size for tensor in tensors.values())
    assert f"{count:,} parameters" in capsys.readouterr().out


def test_default_name_has_the_layout():
    make_checkpoint(Path("model"), LLAMA)
    assert prep.export("model", layout="torchtitan").path.name == "model-torchtitan"


def test_family_without_a_layout_is_refused(capsys: pytest.CaptureFixture[str]):
    config = GROUPED_QUERY | {"model_type": "mistral"}
    tensors = make_checkpoint(Path("model"), config)
    save_state("step-3", torchtitan_state(tensors, config))
    lines = error_lines(capsys, "save-init", "./step-3", "--config", "model", "--out", "init")
    assert "prep has no layout of it for mistral" in " ".join(lines)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_wrong_tensor_is_named(fault: str, capsys: pytest.CaptureFixture[str]):
    state = torchtitan_state(make_checkpoint(Path("model"), LLAMA), LLAMA)
    name = "layers.1.feed_forward.w2.weight"
    value = state[name]
    if fault == "extra":
        state["layers.1.feed_forward.w4.weight"] = value
    elif fault == "missing":
        del state[name]
    else:
        state[name] = np.ascontiguousarray(value[:-1])
    save_state("step-3", state)
    error = "".join(error_lines(capsys, "save-init", "./step-3", "--config", "model"))
    named = "layers.1.feed_forward.w4" if fault == "extra" else "layers.1.feed_forward.w2"
    assert named in "".join(error.split())


@pytest.mark.slow
def test_boxes_of_several_ranks_are_read():
    """The rows of a matrix are split between ranks, and the last rank has fewer."""
    tensors = make_checkpoint(Path("model"), LLAMA)
    state = torchtitan_state(tensors, LLAMA)
    save_sharded(Path("step-3"), state, ranks=3)
    run_ok("save-init", "./step-3", "--config", "model", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
