"""Weights as training scripts save them: a prefix on all names, a state dict beside other values, other file names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prepcli.commands.cli.main import main
from tests.helpers.golden_flax import LLAMA as FLAX_LLAMA
from tests.helpers.pickle_builder import make_checkpoint_file, make_torch_file
from tests.helpers.run_cli import exported_tensors, run_failing, run_json, run_ok
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import GPT2, LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.towers import write_model


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_weights(name: str, content: bytes) -> None:
    """Write a folder `w` with the config of `m` and a file of weights."""
    Path("w").mkdir()
    shutil.copy("m/config.json", "w")
    Path("w", name).write_bytes(content)


def write_prefixed(tensors: dict[str, np.ndarray], prefix: str, name: str) -> None:
    """Write a folder `w` with a prefix on all names."""
    prefixed = {prefix + key: value for key, value in tensors.items()}
    if name.endswith(".bin"):
        write_weights(name, make_torch_file(prefixed))
    else:
        write_weights(name, b"")
        save_file(prefixed, Path("w", name))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.model.", "_orig_mod.module."])
def test_prefix_of_all_names_is_taken_off(
    prefix: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_prefixed(tensors, prefix, name)
    assert main(["save-init", "./w", "--out", "init"]) == 0
    note = f"the prefix `{prefix}` of all tensors of ./w is taken off"
    assert note in capsys.readouterr().err
    assert_same(exported_tensors("init"), tensors)
    run_ok("verify", "./w", "./m")
    run_ok("verify", "init", "./w")


def test_prefix_of_a_tied_model_is_taken_off() -> None:
    """The family's own prefix is common to all names of a tied model, and stays."""
    tensors = make_checkpoint(Path("m"), LLAMA | {"tie_word_embeddings": True})
    tensors.pop("lm_head.weight", None)
    write_prefixed(tensors, "model.", "model.safetensors")
    run_ok("pad-vocab", "./w", "--size", "131", "--out", "padded")
    assert_same(read_tensors(Path("padded")), tensors)


def test_own_prefix_of_a_family_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_checkpoint(Path("m"), GPT2)
    assert main(["pad-vocab", "./m", "--size", "131", "--out", "padded"]) == 0
    assert "taken off" not in capsys.readouterr().err
    assert_same(read_tensors(Path("padded")), tensors)


def test_prefix_of_a_multimodal_model_is_taken_off() -> None:
    tensors = write_model("qwen3_vl", Path("m"))
    shutil.copytree("m", "w")
    prefixed = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    write_safetensors(Path("w/model.safetensors"), prefixed)
    run_ok("save-init", "./w", "--out", "init")
    assert json.loads(Path("init/prep-manifest.json").read_text())["family"] == "qwen3"
    assert exported_tensors("init").keys() == tensors.keys()
    run_ok("verify", "exported", "./m")


def test_verbatim_keeps_a_prefix() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_prefixed(tensors, "module.", "model.safetensors")
    run_ok("save-init", "./w", "--verbatim", "--out", "init")
    assert_same(exported_tensors("init"), {f"module.{k}": v for k, v in tensors.items()})


def test_drop_of_a_prefixed_name() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_prefixed(tensors | {"head.weight": np.zeros(3, np.float32)}, "module.", "x.safetensors")
    run_ok("save-init", "./w", "--drop", "module.head.*", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def checkpoint_values(tensors: dict[str, np.ndarray]) -> dict[str, object]:
    """Return the entries of a checkpoint of nanoGPT, with the states of random generators."""
    return {
        "model": tensors,
        "optimizer": {"state": {}, "param_groups": {}},
        "iter_num": 5,
        "best_val_loss": np.float32(1.5),
        "rng_state": np.arange(5, dtype=np.uint8),
    }


def test_state_dict_beside_a_tensor_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    prefixed = {f"_orig_mod.{key}": value for key, value in tensors.items()}
    write_weights("ckpt.pt", make_checkpoint_file(checkpoint_values(prefixed)))
    assert main(["save-init", "./w", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert "the tensors under `model` of ckpt.pt are read, not `optimizer`, `iter_num`" in error
    assert_same(exported_tensors("init"), tensors)


def test_state_dict_under_another_key_is_read() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    values = {"net": tensors, "rng": {"cpu": np.arange(5, dtype=np.uint8)}}
    write_weights("ckpt.pt", make_checkpoint_file(values))
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_two_state_dicts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_weights("ckpt.pt", make_checkpoint_file({"net": tensors, "ema": tensors}))
    error = run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    assert "it has tensors by name in `net` and `ema`, which is ambiguous" in error
    assert "torch.save() only the model's state_dict()" in error
    assert "download" not in error


@pytest.mark.parametrize("name", ["weights.msgpack", "model.msgpack"])
def test_flax_file_of_any_name_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("f").mkdir()
    shutil.copy(FLAX_LLAMA / "flax/config.json", "f")
    shutil.copy(FLAX_LLAMA / "flax/flax_model.msgpack", Path("f", name))
    run_ok("save-init", "./f", "--out", "init")
    assert_same(exported_tensors("init"), read_tensors(FLAX_LLAMA / "hf"))
    assert run_json(capsys, "inspect", "./f")["source"]["format"] == "flax"
    shutil.copy(Path("f", name), "f/other.msgpack")
    error = run_failing(capsys, 1, "save-init", "./f", "--out", "x")
    assert "holds 2 msgpack files" in error
    assert "name one of them" in error


CUT = "download it again"
WHOLE = "get or create the checkpoint again"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "flax_model.msgpack"])
def test_hint_downloads_only_cut_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_weights(name, b"")
    if name == "model.safetensors":
        save_file(tensors, Path("w", name))
    elif name == "pytorch_model.bin":
        Path("w", name).write_bytes(make_torch_file(tensors))
    else:
        shutil.copy(FLAX_LLAMA / "flax/flax_model.msgpack", Path("w", name))
    content = Path("w", name).read_bytes()
    for damaged in (content[:-100], content[: len(content) // 2], b""):
        Path("w", name).write_bytes(damaged)
        assert CUT in run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    # All bytes are there, and one has another value. A safetensors file begins with the length of its header.
    position = 8 if name == "model.safetensors" else 0
    flipped = bytes([content[position] ^ 0x40])
    Path("w", name).write_bytes(content[:position] + flipped + content[position + 1 :])
    error = run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    assert CUT not in error
    assert "hint: " in error


def test_hint_for_an_index_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(Path("m"), LLAMA)
    index = Path("m/model.safetensors.index.json")
    whole = index.read_text()
    index.write_text(json.dumps({"metadata": {}}))
    assert WHOLE in run_failing(capsys, 1, "save-init", "./m", "--out", "init")
    index.write_text(whole[:-20])
    assert CUT in run_failing(capsys, 1, "save-init", "./m", "--out", "init")
