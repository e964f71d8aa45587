"""`prep verify --chain` proves no link with a part that was not compared, and shows edited tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import xxhash
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.formats.added_tokens import RECORD_FILE
from prepcli.formats.manifest import record_file
from prepcli.restore.digest_checks import towers_digest
from prepcli.sources.locate import Access, locate
from prepcli.sources.opening import open_source
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors
from tests.helpers.tokenizer_folders import write_json
from tests.helpers.tokenizer_folders import write_model as write_word_model
from tests.helpers.towers import write_model
from tests.helpers.training_folder import write_tokenizer

LOCK = "m.lock.json"


@pytest.fixture
def model() -> Path:
    """Write a model `m` with a tokenizer to the working folder."""
    make_checkpoint(Path("m"), LLAMA)
    write_tokenizer(Path("m"))
    return Path("m")


def set_source(folder: str, source: str) -> None:
    """Change the recorded source of an output, without its identity."""
    with changed_manifest(Path(folder)) as manifest:
        manifest["source"]["name"] = source
        manifest.pop("origin", None)


def only_link(output: str) -> prep.ChainLink:
    (link,) = prep.verify_chain(output).links
    return link


@pytest.mark.parametrize("source", ["out", "other"], ids=["itself", "each-other"])
def test_output_that_is_its_own_source_fails(model: Path, source: str):
    prep.lock(model)
    prep.pad_vocab(model, "out", multiple=8)
    shutil.copytree("out", "other")
    set_source("out", source)
    set_source("other", "out")
    broken = prep.verify_chain("out", lock=LOCK).broken_link
    assert broken is not None
    assert broken.status == "failed"
    assert "records itself as source" in broken.reason


def test_lock_without_a_compared_checkpoint_fails(model: Path):
    prep.lock(model)
    prep.pad_vocab(model, "out", multiple=8)
    model.rename("moved")
    broken = prep.verify_chain("out", lock=LOCK, allow_unproven=True).broken_link
    assert broken is not None
    assert broken.status == "failed"
    assert broken.reason == "the lock was compared with no checkpoint"


def test_first_layers_are_compared_with_the_first_layers(model: Path):
    prep.save_init(model, "one", layers=1)
    link = only_link("one")
    assert (link.status, link.reason) == ("proven", "")
    assert link.changed.startswith("left out: layers.1.input_layernorm.weight, ")
    assert "`num_hidden_layers`" in link.changed
    with changed_manifest(Path("one")) as manifest:
        manifest["dropped"].pop()
    assert "missing tensors of m" in only_link("one").reason


def test_keys_of_a_replaced_config_are_listed(model: Path):
    config = json.loads(Path("m/config.json").read_text())
    Path("other.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    prep.save_init(model, "out", config="other.json")
    link = only_link("out")
    assert link.status == "proven"
    assert link.changed == "config.json differs from the one of m: `rms_norm_eps`"


def test_added_file_is_not_shown(model: Path):
    prep.pad_vocab(model, "out", multiple=8)
    path = Path("out/chat_template.jinja")
    path.write_text("{{ messages }}")
    with changed_manifest(Path("out")) as manifest:
        manifest["files"][path.name] = record_file(path)
    link = only_link("out")
    assert link.status == "holds"
    assert link.changed == "other files: chat_template.jinja"


def test_copied_file_is_compared(model: Path):
    Path("m/modeling.py").write_text("x = 1")
    prep.save_init(model, "out", copy=["*.py"])
    assert only_link("out").status == "proven"
    Path("m/modeling.py").write_text("x = 2")
    assert only_link("out").reason == "other content than in m: modeling.py"


def test_lost_file_is_a_difference(model: Path):
    prep.pad_vocab(model, "out", multiple=8)
    Path("out/tokenizer.json").unlink()
    with changed_manifest(Path("out")) as manifest:
        del manifest["files"]["tokenizer.json"]
    link = only_link("out")
    assert link.status == "failed"
    assert link.reason == "missing files of m: tokenizer.json"


def test_excluded_file_explains_no_other_one(model: Path):
    Path("m/README.md").write_text("card")
    prep.save_init(model, "init")
    prep.export("init", "out", exclude="README.md")
    assert prep.verify_chain("out").links[0].changed == "left out: README.md"
    Path("out/tokenizer.json").unlink()
    with changed_manifest(Path("out")) as manifest:
        del manifest["files"]["tokenizer.json"]
    assert prep.verify_chain("out").links[0].reason == "missing files of init: tokenizer.json"


def test_lost_tensor_is_a_difference_unless_recorded(model: Path):
    make_checkpoint(Path("old"), GPT_NEO, legacy=True)
    prep.save_init("old", "out")
    link = only_link("out")
    assert link.status == "proven"
    assert link.changed.startswith("left out: ")
    with changed_manifest(Path("out")) as manifest:
        manifest["dropped"] = []
    link = only_link("out")
    assert link.status == "failed"
    assert link.reason.startswith("missing tensors of old: ")


def test_lost_rows_are_a_difference_unless_recorded(model: Path):
    prep.pad_vocab(model, "padded", multiple=8)
    prep.export("padded", "out")
    assert prep.verify_chain("out")
    with changed_manifest(Path("out")) as manifest:
        manifest["dropped"] = []
    link = prep.verify_chain("out").links[0]
    assert link.status == "failed"
    assert (
        link.reason == "another dtype or shape than in padded: embed_tokens.weight, lm_head.weight"
    )


@pytest.mark.parametrize(
    "key",
    slow_except(["rms_norm_eps", "max_position_embeddings", "eos_token_id"], ["rms_norm_eps"]),
)
def test_changed_key_of_the_config_is_a_difference(model: Path, key: str):
    """No option of this command writes these keys."""
    prep.save_init(model, "out")
    with changed_manifest(Path("out")) as manifest:
        manifest["config"][key] = 13
    link = only_link("out")
    assert link.status == "failed"
    assert f"`{key}`" in link.reason


@pytest.mark.slow
def test_towers_of_the_start_model_are_not_shown(model: Path):
    """A training step has no towers. Its export reads them from the start model."""
    write_model("llava", Path("start"))
    prep.save_init("start", "init")
    towers = json.loads(Path("init/prep-manifest.json").read_text())["towers"]
    prep.export("start", "text", text_only=True)
    prep.save_init("text", "step")
    with changed_manifest(Path("step")) as manifest:
        records = manifest["tensors"]
        manifest["tensors"] = {f"language_model.{name}": records[name] for name in records}
        start = open_source(locate("start", access=Access()))
        manifest["towers"] = {**towers, "path": "start", "digest": towers_digest(start)}
    prep.export("step", "hf")
    link = prep.verify_chain("hf").links[0]
    assert (link.status, link.not_shown) == ("holds", "read from the start model")
    assert link.check == "prep verify hf start"
    assert prep.verify("hf", "start")
    path = Path("start/model.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if "vision" in name)
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)
    assert not prep.verify("hf", "start")


def test_text_part_is_compared_with_the_text_part(model: Path):
    write_model("llava", Path("start"))
    prep.export("start", "text", text_only=True)
    link = only_link("text")
    assert (link.status, link.reason) == ("proven", "")
    assert link.proof == "39 tensors, config"
    assert link.changed == "left out: towers, preprocessor_config.json"
    with changed_manifest(Path("text")) as manifest:
        manifest["dropped"] = []
    assert only_link("text").status == "failed"


def test_options_are_found_behind_a_name_with_a_quote(model: Path):
    shutil.copytree(model, "o'brien --init x")
    prep.pad_vocab("o'brien --init x", "zeros", multiple=8)
    prep.pad_vocab("o'brien --init x", "mean", multiple=8, init="mean")
    assert only_link("zeros").status == "proven"
    assert only_link("mean").status == "holds"


# `prep verify --chain` through outputs of `add-tokens` and `remove-tokens`


EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def _folder() -> None:
    Path("first.txt").write_text("<tool>\n<end>\n")
    Path("second.txt").write_text("zzz\n")


@pytest.mark.parametrize("init", slow_except(["mean", "zeros", "normal"], ["zeros"]))
@pytest.mark.parametrize("has_padding", slow_except([False, True], [True]))
def test_rows_of_added_tokens_are_not_shown(
    has_padding: bool, init: Literal["mean", "zeros", "normal"]
):
    size = write_word_model(Path("m")).get_vocab_size()
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


@pytest.mark.slow
def test_output_of_added_tokens_is_proven_through_an_export():
    write_word_model(Path("m"))
    prep.add_tokens("m", "added", tokens="first.txt")
    prep.save_init("added", "init")
    prep.export("init", "hf")
    assert prep.verify_chain("hf")


@pytest.mark.parametrize(
    "name", slow_except(["tokenizer.json", "tokenizer_config.json"], ["tokenizer.json"])
)
def test_changed_tokenizer_of_the_source_breaks_the_link(name: str):
    write_word_model(Path("m"))
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


@pytest.mark.parametrize("command", slow_except(["add-tokens", "remove-tokens"], ["add-tokens"]))
@pytest.mark.parametrize("place", ["old", "padding"])
def test_forged_rows_break_the_link(command: str, place: str):
    size = write_word_model(Path("m"), files=1).get_vocab_size()
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
    size = write_word_model(Path("m"), files=1, intermediate_size=400).get_vocab_size()
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
    size = write_word_model(Path("m"), files=1).get_vocab_size()
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
