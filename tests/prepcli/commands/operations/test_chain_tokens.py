"""`prep verify --chain` through outputs of `add-tokens` and `remove-tokens`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import xxhash

import prepcli as prep
from prepcli.formats.added_tokens import RECORD_FILE
from prepcli.formats.manifest import record_file
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.tokenizer_folders import write_json, write_model

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first.txt").write_text("<tool>\n<end>\n")
    Path("second.txt").write_text("zzz\n")


@pytest.mark.parametrize("init", ["mean", "zeros", "normal"])
@pytest.mark.parametrize("has_padding", [False, True])
def test_rows_of_added_tokens_are_not_shown(
    has_padding: bool, init: Literal["mean", "zeros", "normal"]
):
    size = write_model(Path("m")).get_vocab_size()
    prep.pad_vocab("m", "start", size=size + 8 * has_padding)
    prep.add_tokens("start", "once", tokens="first.txt", init=init)
    prep.add_tokens("once", "twice", tokens="second.txt", init=init)
    prep.remove_tokens("twice", "back")
    prep.remove_tokens("back", "removed")
    proof = prep.verify_chain("removed")
    assert proof
    assert [link.status for link in proof.links] == ["holds"] * 4 + ["proven"]
    expected = "edited for tokens" if init == "zeros" else "edited for tokens; new rows"
    assert proof.links[3].not_shown == expected
    for link in proof.links[:4]:
        shutil.rmtree("AGAIN", ignore_errors=True)
        for command in link.check.split(" && "):
            run_ok(*command.removeprefix("prep ").split())


def test_output_of_added_tokens_is_proven_through_an_export():
    write_model(Path("m"))
    prep.add_tokens("m", "added", tokens="first.txt")
    prep.save_init("added", "init")
    prep.export("init", "hf")
    assert prep.verify_chain("hf")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_changed_tokenizer_of_the_source_breaks_the_link(name: str):
    write_model(Path("m"))
    prep.add_tokens("m", "added", tokens="first.txt")
    write_json(Path("m", name), json.loads(Path("m", name).read_text()) | {"more": 1})
    broken = prep.verify_chain("added").broken_link
    assert broken is not None
    assert name in broken.reason


def forge_row(folder: Path, name: str, row: int) -> None:
    """Change a row of a tensor together with its digests."""
    values = read_tensors(folder)[name].copy()
    before = values.tobytes()
    values[row] += 1
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes().replace(before, values.tobytes()))
    with changed_manifest(folder) as manifest:
        for record in manifest["tensors"][name]["digests"]:
            rows = values[record[0] : record[1]]
            record[2] = xxhash.xxh3_128_hexdigest(rows.tobytes())


@pytest.mark.parametrize("command", ["add-tokens", "remove-tokens"])
@pytest.mark.parametrize("place", ["old", "padding"])
def test_forged_rows_break_the_link(command: str, place: str):
    size = write_model(Path("m"), files=1).get_vocab_size()
    prep.pad_vocab("m", "start", size=size + 8)
    prep.add_tokens("start", "out", tokens="first.txt")
    if command == "remove-tokens":
        Path("out").rename("added")
        prep.remove_tokens("added", "out")
    forge_row(Path("out"), EMBEDDING, 3 if place == "old" else size + 5)
    broken = prep.verify_chain("out").broken_link
    assert broken is not None
    assert (broken.command, broken.status) == (command, "failed")
    assert "embed_tokens" in broken.reason


def test_split_digest_of_another_tensor_is_compared():
    size = write_model(Path("m"), files=1, intermediate_size=400).get_vocab_size()
    prep.add_tokens("m", "out", tokens="first.txt")
    name = "model.layers.0.mlp.gate_proj.weight"
    with changed_manifest(Path("out")) as manifest:
        edges = [(0, size), (size, size + 2), (size + 2, 400)]
        manifest["tensors"][name]["digests"] = [[low, high, ""] for low, high in edges]
    forge_row(Path("out"), name, size)
    broken = prep.verify_chain("out").broken_link
    assert broken is not None
    assert "mlp.gate_proj" in broken.reason


def rewrite_record(folder: Path, **changes: object) -> None:
    """Change the last addition of a record, and the digests of its files and of the manifest."""
    record = json.loads(Path(folder, RECORD_FILE).read_text())
    record["additions"][-1].update(changes)
    write_json(folder / RECORD_FILE, record)
    with changed_manifest(folder) as manifest:
        for name in (RECORD_FILE, *record["additions"][-1]["files"]):
            manifest["files"][name] = record_file(folder / name)


def test_tokens_in_place_of_old_ones_break_the_link():
    size = write_model(Path("m"), files=1).get_vocab_size()
    prep.add_tokens("m", "out", tokens="first.txt")
    # The record says that the rows of two old tokens are new.
    tokens = [{"id": size - 2, "content": "<tool>"}, {"id": size - 1, "content": "<end>"}]
    rewrite_record(Path("out"), true_vocab_size=size - 2, padded_vocab_size=size, tokens=tokens)
    with changed_manifest(Path("out")) as manifest:
        for record in manifest["tensors"].values():
            if len(record["digests"]) > 1:
                record["digests"] = [[0, size - 2, ""], [size - 2, size, ""], [size, size + 2, ""]]
    for name in (EMBEDDING, "lm_head.weight"):
        forge_row(Path("out"), name, size - 1)
    broken = prep.verify_chain("out").broken_link
    assert broken is not None
    assert broken.reason == "other values than in m: embed_tokens.weight, lm_head.weight"
