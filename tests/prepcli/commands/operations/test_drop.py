"""`--drop`: one rule for families, text parts and towers of multimodal models, and verbatim checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.towers import write_model

FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def add_tensors(names: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Add vectors to the model `m`, and return its other tensors."""
    tensors: dict[str, np.ndarray] = {}
    for path in Path("m").glob("*.safetensors*"):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        path.unlink()
    extra = {name: np.ones(size, np.float32) for name, size in names.items()}
    save_file(tensors | extra, f"m/{FILE}", {"format": "pt"})
    return tensors


def dropped_names(folder: str) -> list[tuple[object, object]]:
    """Return name and rule of each tensor that the manifest records as dropped."""
    manifest = read_manifest(Path(folder)) or NO_MANIFEST
    return [(entry["name"], entry["rule"]) for entry in manifest.dropped]


def assert_tensors(folder: str, expected: Mapping[str, np.ndarray]) -> None:
    tensors = load_file(f"{folder}/{FILE}")
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], values) for name, values in expected.items())


@pytest.mark.parametrize(
    "pattern", ["transformer.h.*.extra.weight", "h.*.extra.weight", "*extra*", "transformer.*"]
)
def test_drop_matches_names_with_and_without_prefix(pattern: str):
    make_checkpoint(Path("m"), GPT_NEO)
    name = "transformer.h.1.extra.weight"
    add_tensors({name: 3})
    run_ok("save-init", "./m", "--drop", pattern)
    assert dropped_names("m-init") == [(name, "--drop")]


def test_drop_never_drops_used_tensors(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    lines = error_lines(capsys, "save-init", "./m", "--drop", "*")
    assert lines[0] == "error: `--drop '*'` drops nothing of ./m"
    tensors = add_tensors({"model.extra": 3})
    run_ok("save-init", "./m", "--drop", "*")
    assert dropped_names("m-init") == [("model.extra", "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    assert_tensors("hf", tensors)


def test_pad_vocab_drops_buffers_of_the_family():
    """Without the option it copies them."""
    make_checkpoint(Path("m"), LLAMA)
    names = [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(3)]
    add_tensors(dict.fromkeys(names, 4))
    run_ok("pad-vocab", "./m", "--multiple", "8", "--out", "all")
    assert load_file(f"all/{FILE}").keys() >= {*names}
    run_ok("pad-vocab", "./m", "--multiple", "8", "--drop", "*.inv_freq", "--out", "padded")
    assert load_file(f"padded/{FILE}").keys().isdisjoint(names)
    assert dropped_names("padded") == [(name, "--drop") for name in names]


def test_drop_of_verbatim_checkpoints(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    tensors = add_tensors({"a.scale": 3, "b.scale": 4})
    run_ok("save-init", "./m", "--verbatim", "--drop", "*.scale")
    assert dropped_names("m-init") == [("a.scale", "--drop"), ("b.scale", "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    assert_tensors("hf", tensors)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "./m", "--verbatim", "--drop", "*", "--out", "none")
    assert lines[0] == "error: `--drop '*'` drops every tensor of ./m"


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_drop_of_the_text_part_of_a_multimodal_model(
    model_type: str, capsys: pytest.CaptureFixture[str]
):
    write_model(model_type)
    prefix = {"gemma3": "language_model.model.", "qwen3_vl": "model.language_model."}[model_type]
    names = [f"{prefix}layers.{number}.self_attn.k_scale" for number in range(2)]
    tensors = add_tensors(dict.fromkeys(names, 1))
    lines = error_lines(capsys, "save-init", "./m", "--no-verbatim")
    pattern = f"{prefix}layers.*.self_attn.k_scale"
    hint = f" hint: `prep save-init --drop '{pattern}'` converts without such tensors"
    assert lines[2] == hint
    run_ok("save-init", "./m", "--no-verbatim", "--drop", pattern)
    assert dropped_names("m-init") == [(name, "--drop") for name in names]
    manifest = read_manifest(Path("m-init")) or NO_MANIFEST
    assert manifest.towers is not None
    run_ok("export", "m-init", "--out", "hf")
    assert_tensors("hf", tensors)
    run_ok("verify", "m-init")
    run_ok("pad-vocab", "./m", "--multiple", "8", "--drop", pattern, "--out", "padded")
    assert load_file(f"padded/{FILE}").keys() == tensors.keys()


def test_drop_of_towers(capsys: pytest.CaptureFixture[str]):
    write_model("qwen3_vl")
    tensors = add_tensors({"model.visual.blocks.0.attn.q_scale": 1})
    run_ok("save-init", "./m", "--drop", "model.visual.*.q_scale")
    assert dropped_names("m-init") == [("model.visual.blocks.0.attn.q_scale", "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    assert_tensors("hf", tensors)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "./m", "--drop", "model.language_model.*")
    assert lines[0].endswith("drops nothing of ./m")


def test_drop_is_reported_in_json(capsys: pytest.CaptureFixture[str]):
    write_model("qwen3_vl")
    add_tensors({"model.visual.blocks.0.attn.q_scale": 1})
    capsys.readouterr()
    run_ok("save-init", "./m", "--drop", "*.q_scale", "--dry-run", "--json")
    accounting = json.loads(capsys.readouterr().out)["accounting"]
    (entry,) = accounting["dropped"]
    assert (entry["name"], entry["rule"]) == ("model.visual.blocks.0.attn.q_scale", "--drop")
