"""Conversions of tied weights, for each combination of config and stored tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import (
    GPT2,
    GPT_NEO,
    LLAMA,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)

HEAD = "lm_head.weight"
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "gpt_neo": "transformer.wte.weight",
    "llama": "model.embed_tokens.weight",
}
TIED = {"tie_word_embeddings": True}
BASES = [pytest.param(base | TIED, id=base["model_type"]) for base in (GPT2, GPT_NEO, LLAMA)]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_tied_model(
    base: dict[str, Any], change: Callable[[dict[str, np.ndarray], str], object]
) -> dict[str, np.ndarray]:
    """Write a tied checkpoint `m` after a change to its tensors, and return the unchanged tensors."""
    tensors = make_checkpoint(Path("unchanged"), base, tied=True)
    changed = dict(tensors)
    change(changed, EMBEDDINGS[base["model_type"]])
    write_checkpoint(Path("m"), base, changed)
    return tensors


def move_embedding_to_head(tensors: dict[str, np.ndarray], embedding: str) -> None:
    tensors[HEAD] = tensors.pop(embedding)


def copy_embedding_to_head(tensors: dict[str, np.ndarray], embedding: str) -> None:
    tensors[HEAD] = tensors[embedding].copy()


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not same_bits(actual[name], expected[name])] == []


@pytest.mark.parametrize("change", [move_embedding_to_head, copy_embedding_to_head])
@pytest.mark.parametrize("base", BASES)
def test_tied_head_is_stored_once_and_round_trips(base: dict[str, Any], change: Any):
    tensors = write_tied_model(base, change)
    run_ok("save-init", "./m", "--pad-vocab", "8")
    assert not list(Path("m-init").rglob("*head*"))
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "m-init", "./unchanged")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert json.loads(Path("back/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("base", BASES)
def test_head_without_embedding_is_padded(base: dict[str, Any]):
    tensors, embedding = (
        write_tied_model(base, move_embedding_to_head),
        EMBEDDINGS[base["model_type"]],
    )
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "mean")
    actual = read_tensors(Path("m-padded"))
    assert actual.keys() == tensors.keys()
    assert actual[embedding].shape == (136, 32)
    assert same_bits(actual[embedding][:131], tensors[embedding])
    run_ok("verify", "m-padded")


@pytest.mark.parametrize("base", BASES)
def test_head_and_embedding_are_padded_equally(base: dict[str, Any]):
    write_tied_model(base, copy_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "normal")
    actual = read_tensors(Path("m-padded"))
    assert actual[HEAD].shape == (136, 32)
    assert same_bits(actual[HEAD], actual[EMBEDDINGS[base["model_type"]]])


def change_head_value(tensors: dict[str, np.ndarray], embedding: str) -> None:
    copy_embedding_to_head(tensors, embedding)
    tensors[HEAD][77, 3] += 1


def change_head_dtype(tensors: dict[str, np.ndarray], embedding: str) -> None:
    tensors[HEAD] = tensors[embedding].astype(np.float16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_head_value, "first difference in row 77"),
        (change_head_dtype, "float16 [131, 32] and float32 [131, 32]"),
    ],
)
@pytest.mark.parametrize("command", ["save-init", "pad-vocab"])
@pytest.mark.parametrize("base", BASES)
def test_different_head_is_an_error_without_untie(
    base: dict[str, Any], command: str, change: Any, why: str, capsys
):
    write_tied_model(base, change)
    assert main([command, "./m", "--out", "out"]) == 1
    text = capsys.readouterr().err
    assert f"{HEAD} is not equal to {EMBEDDINGS[base['model_type']]}" in text
    assert why in text
    assert not Path("out").exists()
    run_ok(command, "./m", "--out", "out", "--untie", "--restart")
    config = Path("out/config.json") if command == "pad-vocab" else Path("out/hf/config.json")
    assert json.loads(config.read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("base", BASES)
def test_export_compares_tied_head_in_true_rows(base: dict[str, Any], capsys):
    """The head is not written, but its true rows must equal the embedding's."""
    write_tied_model(base, copy_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8")
    for path in Path("m-padded").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if HEAD in header:
            data[8 + size + header[HEAD]["data_offsets"][0] + 5 * 128] ^= 1
            path.write_bytes(data)
    with changed_manifest(Path("m-padded")) as manifest:
        for record in manifest["tensors"].values():
            record["digests"] = []
    assert main(["export", "m-padded", "--out", "out"]) == 1
    assert "first difference in row 5" in capsys.readouterr().err
