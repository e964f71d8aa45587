"""Orbax checkpoints of other programs as sources, and `--source-layout`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.algebra.boxes import full_box
from prepcli.commands.cli.main import main
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import read_item
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array
from prepcli.restore import item_reader
from prepcli.sources.openers import orbax_item
from tests.helpers.levanter_trees import TREES as LEVANTER_TREES
from tests.helpers.levanter_trees import write_levanter
from tests.helpers.native_trees import array_metas, expected_leaves
from tests.helpers.orbax_items import write_metadata
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, exported_tensors, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    GROUPED_QUERY,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
    same_bits,
)
from tests.helpers.zarr_items import STORAGE_FORMS, StorageForm, write_zarr_item

MODELS = {"gpt_neo": GPT_NEO, "llama": LLAMA}
ZSTD = StorageForm(codec_names=("zstd",))
CHUNK_FILES = StorageForm(ocdbt=False)


def run_prep(*words: str, code: int = 0) -> None:
    assert main([*words, "--progress", "none"]) == code


def native_leaves(
    base: dict[str, Any], tensors: dict[str, np.ndarray], scan: bool, axis: int
) -> dict[str, np.ndarray]:
    """Return the leaves of prep's native tree without padding, by path below `params`."""
    config = {**base, "vocab_size": 131}
    leaves = expected_leaves(config, tensors, scan, axis)
    cut = {name: leaf[:131] if leaf.shape[:1] == (136,) else leaf for name, leaf in leaves.items()}
    return {name.removeprefix("params."): np.ascontiguousarray(leaf) for name, leaf in cut.items()}


def flax_leaves(family: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the leaves of transformers' Flax models, renamed by the rules of that library."""
    leaves = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem == name or tensor.ndim == 1:
            norm = stem != name and family == "gpt_neo"
            leaves[f"{stem}.scale" if norm else name] = tensor
        elif stem.rpartition(".")[2] in ("wte", "wpe", "embed_tokens"):
            leaves[f"{stem}.embedding"] = tensor
        else:
            leaves[f"{stem}.kernel"] = np.ascontiguousarray(tensor.T)
    return leaves


def check_conversions(source: str, tensors: dict[str, np.ndarray], *more: str) -> None:
    """Check the tensors of a source after save-init and after export."""
    run_prep("save-init", source, "--out", "init", *more)
    run_prep("verify", "init")
    run_prep("verify", "init", "./model")
    run_prep("export", source, "--out", "back", *more)
    actual = read_tensors(Path("back"))
    assert actual.keys() == tensors.keys()
    assert all(same_bits(actual[name], tensors[name]) for name in tensors)


def is_fast_form(form: StorageForm) -> bool:
    """Return whether the default suite has the form: files of chunks, and all codecs with and without shards.

    `test_read_item_supports_every_storage_form` reads all forms.
    """
    return (len(form.codec_names) > 1 and form.chunks_per_shard != 1) or form == CHUNK_FILES


@pytest.mark.parametrize("form", slow_except(STORAGE_FORMS, is_fast_form), ids=str)
def test_all_orbax_storage_forms_convert(tmp_path: Path, form: StorageForm):
    tensors = make_checkpoint(tmp_path / "model", GPT_NEO)
    write_zarr_item(
        tmp_path / "item", array_metas(native_leaves(GPT_NEO, tensors, True, 0), "params.", 2), form
    )
    run_prep("save-init", "./item", "--config", "./model", "--out", "init")
    run_prep("verify", "init", "./model")
    assert_same(exported_tensors("init"), tensors)


ROOTS = ("", "params.", "params.params.")
LAYERS = ((True, 0), (True, 1), (False, 0))
TREES = [(family, root, *layers) for family in MODELS for root in ROOTS for layers in LAYERS]


def is_fast_tree(case: tuple[str, str, bool, int]) -> bool:
    """Return whether the default suite has the case: each root and each form of the layers with each family."""
    family, root, *layers = case
    return (
        list(MODELS).index(family) + ROOTS.index(root) + LAYERS.index((layers[0], layers[1]))
    ) % 3 == 0


@pytest.mark.parametrize(
    ("family", "root", "scan", "axis"),
    slow_except(TREES, lambda case: is_fast_tree(case) and case[0] == "llama"),
)
def test_native_tree_without_manifest_converts(
    tmp_path: Path, family: str, root: str, scan: bool, axis: int
):
    tensors = make_checkpoint(tmp_path / "model", MODELS[family])
    write_zarr_item(
        tmp_path / "item",
        array_metas(native_leaves(MODELS[family], tensors, scan, axis), root),
        ZSTD,
    )
    check_conversions("./item", tensors, "--config", "./model/config.json")


@pytest.mark.parametrize("family", slow_except(MODELS, ["llama"]))
@pytest.mark.parametrize("pieces", slow_except([1, 3], [3]))
def test_redco_checkpoint_converts(tmp_path: Path, family: str, pieces: int):
    """Parameters of a Flax model next to an optimizer state and a pickle. The pickle is never opened."""
    tensors = make_checkpoint(tmp_path / "model", MODELS[family])
    leaves = flax_leaves(family, tensors)
    write_zarr_item(tmp_path / "last/params", array_metas(leaves, "", pieces), ZSTD)
    write_zarr_item(tmp_path / "last/opt_state", array_metas(leaves, "0.mu."), ZSTD)
    shutil.copyfile(tmp_path / "model/config.json", tmp_path / "last/config.json")
    (tmp_path / "last/params_shape.pkl").write_bytes(
        f"cos\nmkdir\n(S'{tmp_path}/opened'\ntR.".encode()
    )
    (tmp_path / "last/info.json").write_text('{"rng": [0, 1], "step": 3}')
    check_conversions("./last", tensors)
    assert not (tmp_path / "opened").exists()
    assert not (tmp_path / "init/hf/info.json").exists()


def test_training_state_is_dropped_with_a_note(tmp_path: Path, capsys: Capture):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = native_leaves(LLAMA, tensors, True, 0)
    state = {"step": np.array(3, np.int32)} | {
        f"opt_state.mu.{name}": leaf for name, leaf in leaves.items()
    }
    write_zarr_item(
        tmp_path / "run/100/state",
        array_metas(leaves, "params.") | array_metas(state),
        StorageForm(zarr3=True, chunks_per_shard=2),
    )
    run_prep("save-init", "./run", "--config", "./model", "--out", "init", "--json")
    output = capsys.readouterr()
    assert "optimizer state (" in output.err
    dropped = json.loads(output.out)["accounting"]["dropped"]
    assert {(entry["name"], entry["rule"]) for entry in dropped} == {
        ("opt_state", "optimizer state"),
        ("step", "training state"),
    }
    run_prep("verify", "init", "./model")


def test_reshard_reads_foreign_orbax_tree(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas(flax_leaves("llama", tensors)), ZSTD)
    run_prep(
        "reshard", "./item", "--config", "./model", "--mesh", "1,4,1", "--no-scan", "--out", "wide"
    )
    run_prep("verify", "wide", "./model")
    assert_same(exported_tensors("wide"), tensors)


@pytest.mark.parametrize("place", slow_except(["item", "item/hf", ".", "hf"], ["item/hf", "."]))
def test_config_is_found_near_the_item(tmp_path: Path, place: str):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas(native_leaves(LLAMA, tensors, True, 0)), ZSTD)
    (tmp_path / place).mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copyfile(tmp_path / "model" / name, tmp_path / place / name)
    (tmp_path / place / "notes.txt").write_text("not of the model")
    run_prep("save-init", "./item", "--out", "init")
    assert sorted(path.name for path in (tmp_path / "init/hf").iterdir()) == [
        "config.json",
        "tokenizer_config.json",
    ]


def test_orbax_without_config_gets_a_hint(tmp_path: Path, capsys: Capture):
    write_zarr_item(tmp_path / "item", array_metas({"w": np.ones((3, 4), np.float32)}), ZSTD)
    run_prep("save-init", "./item", "--no-verbatim", code=1)
    assert "--config FOLDER" in capsys.readouterr().err


def test_orbax_tree_of_other_model_is_rejected(tmp_path: Path, capsys: Capture):
    make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas({"w": np.ones((3, 4), np.float32)}), ZSTD)
    run_prep("save-init", "./item", "--config", "./model", code=1)
    assert "has no known layout" in capsys.readouterr().err


def test_missing_leaf_is_named(tmp_path: Path, capsys: Capture):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = native_leaves(LLAMA, tensors, True, 0)
    del leaves["layers.attn.q.weight"]
    write_zarr_item(tmp_path / "item", array_metas(leaves), ZSTD)
    run_prep("save-init", "./item", "--config", "./model", code=1)
    assert "model.layers.0.self_attn.q_proj.weight" in capsys.readouterr().err


def test_damaged_chunk_stops_conversion(tmp_path: Path, capsys: Capture):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(
        tmp_path / "item",
        array_metas(native_leaves(LLAMA, tensors, True, 0)),
        StorageForm(ocdbt=False, codec_names=("zstd",)),
    )
    chunk = tmp_path / "item/layers.mlp.up.weight/0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:50])
    run_prep("save-init", "./item", "--config", "./model", "--out", "init", code=1)
    stderr = capsys.readouterr().err
    assert "chunk 0.0.0 of `layers.mlp.up.weight`" in stderr
    assert not (tmp_path / "init").exists()


def test_changed_inline_source_is_detected(tmp_path: Path, capsys: Capture):
    def item(tensors: dict[str, np.ndarray]) -> None:
        shutil.rmtree(tmp_path / "item", ignore_errors=True)
        form = StorageForm(codec_names=("zstd",), max_inline_nbytes=1 << 20)
        write_zarr_item(
            tmp_path / "item", array_metas(native_leaves(LLAMA, tensors, True, 0)), form
        )

    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    item(tensors)
    run_prep("save-init", "./item", "--config", "./model", "--out", "init")
    item({name: tensor + 1 for name, tensor in tensors.items()})
    run_prep("save-init", "./item", "--config", "./model", "--out", "init", code=1)
    assert "from a source that has changed since" in capsys.readouterr().err


@pytest.mark.slow
def test_many_files_are_read_with_few_open(tmp_path: Path, monkeypatch: MonkeyPatch):
    for module in (orbax_item, item_reader):
        monkeypatch.setattr(module, "MAX_OPEN_FILES", 3)
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = native_leaves(LLAMA, tensors, True, 0)
    write_zarr_item(tmp_path / "item", array_metas(leaves, "", 3), StorageForm(ocdbt=False))
    check_conversions("./item", tensors, "--config", "./model")
    item = read_item(tmp_path / "item")
    with item_reader.ItemReader(item, NO_MANIFEST) as reader:
        for name, leaf in leaves.items():
            array = np.empty_like(leaf)
            reader.read(name, {full_box(leaf.shape): array})
            assert same_bits(array, leaf)


def test_inspect_reads_foreign_orbax_tree(tmp_path: Path, capsys: Capture):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(
        tmp_path / "item", array_metas(native_leaves(LLAMA, tensors, True, 0), "params.", 2), ZSTD
    )
    run_prep("inspect", "./item", "--stats", "--json")
    entries = json.loads(capsys.readouterr().out)["tensors"]
    norm = next(entry for entry in entries if entry["name"] == "params.final_norm.scale")
    assert norm["stats"]["max"] == tensors["model.norm.weight"].max()
    assert norm["chunks"] == 2
    run_prep("inspect", "./item")
    assert "Orbax (zstd), 1 data file" in capsys.readouterr().out


def test_chunks_in_descending_order_are_loaded(tmp_path: Path):
    """TensorStore writes the chunks of an array in any order."""
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    meta = unplaced_array(("w",), (6, 4), "float32", (2, 4))
    name = "d/" + "a" * 32
    (tmp_path / "item/d").mkdir(parents=True)
    (tmp_path / "item" / name).write_bytes(
        array[4:].tobytes() + array[2:4].tobytes() + array[:2].tobytes()
    )
    chunks = [WrittenChunk(0, (row, 0), 0, 64 - 32 * row, 32) for row in range(3)]
    write_metadata(tmp_path / "item", [meta], chunks, [name])
    params = prep.load_params("./item", dtype="keep", verbatim=True)
    np.testing.assert_array_equal(np.asarray(params["w"]), array)


# `--source-layout`: the layout of a tree to read, named by the user


GROUPED_LLAMA = GROUPED_QUERY | {"model_type": "llama"}


@pytest.fixture
def levanter_step() -> None:
    tensors = make_checkpoint(Path("model"), GROUPED_LLAMA)
    write_levanter(Path("step-3"), LEVANTER_TREES["levanter"](tensors, GROUPED_LLAMA), 3)


LAYOUT = ("--source-layout", "levanter")
CONFIG = ("--config", "model")


@pytest.mark.usefixtures("levanter_step")
@pytest.mark.parametrize("command", slow_except(["save-init", "reshard"], ["save-init"]))
def test_named_layout_is_read(command: str):
    options = ("--mesh", "1,1,1") if command == "reshard" else ()
    run_ok(command, "./step-3", *CONFIG, *LAYOUT, *options, "--out", "init")
    run_ok("verify", "init", "./model")
    assert_same(exported_tensors("init"), read_tensors(Path("model")))


@pytest.mark.usefixtures("levanter_step")
def test_export_reads_one_layout_and_writes_another():
    run_ok("export", "./step-3", *CONFIG, *LAYOUT, "--layout", "easylm", "--out", "out")
    run_ok("export", "out", "--source-layout", "easylm", "--out", "back")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


@pytest.mark.usefixtures("levanter_step")
def test_verify_reads_the_first_checkpoint_in_the_layout():
    run_ok("verify", "./step-3", "./model", *CONFIG, *LAYOUT)


@pytest.mark.usefixtures("levanter_step")
def test_inspect_shows_the_tensors_of_the_model(capsys: Capture):
    run_ok("inspect", "./step-3", *CONFIG, *LAYOUT)
    assert "model.layers.2.self_attn.q_proj.weight" in capsys.readouterr().out


@pytest.mark.usefixtures("levanter_step")
@pytest.mark.parametrize(
    "command",
    slow_except(["save-init", "reshard", "export", "verify", "inspect"], ["save-init", "inspect"]),
)
def test_contradicting_layout_is_refused(command: str, capsys: Capture):
    options = ("--mesh", "1,1,1") if command == "reshard" else ()
    words = (*CONFIG, "--source-layout", "tunix", *options)
    lines = error_lines(capsys, command, "./step-3", *words)
    assert lines[0] == "error: `--source-layout tunix` contradicts ./step-3"
    assert lines[-1].endswith("`--source-layout levanter`")


@pytest.mark.usefixtures("levanter_step")
def test_unknown_layout_lists_those_of_the_family(capsys: Capture):
    lines = error_lines(capsys, "save-init", "./step-3", *CONFIG, "--source-layout", "levnter")
    assert lines[0] == "error: `--source-layout levnter` is unknown for llama"
    text = " ".join(" ".join(lines).split())
    assert "its layouts are native, hf-flax, easylm, easylm-scanned, tunix, maxtext" in text
    assert "did you mean `levanter`?" in text


@pytest.mark.usefixtures("levanter_step")
def test_layout_of_a_hugging_face_folder_is_refused(capsys: Capture):
    lines = error_lines(capsys, "save-init", "./model", *LAYOUT, "--out", "init")
    assert lines[0] == "error: `--source-layout levanter` contradicts ./model"
    assert not Path("init").exists()


@pytest.mark.usefixtures("levanter_step")
def test_recorded_layout_is_compared(capsys: Capture):
    run_ok("export", "./model", "--layout", "tunix", "--out", "out")
    run_ok("save-init", "out", "--source-layout", "tunix", "--out", "init")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", *LAYOUT, "--out", "other")
    assert lines[1].endswith("its manifest records the layout tunix")
    lines = error_lines(capsys, "export", "init", *LAYOUT, "--out", "other")
    assert lines[1].endswith("its manifest records the layout native")


@pytest.mark.usefixtures("levanter_step")
def test_layout_without_a_config_is_refused(capsys: Capture):
    lines = error_lines(capsys, "save-init", "./step-3", *LAYOUT, "--out", "init")
    assert lines[0] == "error: `--source-layout levanter` has no effect for ./step-3"
    assert "`--config FOLDER`" in lines[-1]
    assert not Path("init").exists()


@pytest.mark.usefixtures("levanter_step")
@pytest.mark.parametrize("option", [("--verbatim",), ("--map", "names.map")])
def test_layout_of_own_names_is_refused(option: tuple[str, ...], capsys: Capture):
    Path("names.map").write_text("norm.weight: embed <- model.transformer.norm.weight: embed\n")
    words = ("./step-3", *CONFIG, *LAYOUT, *option, "--out", "init")
    lines = error_lines(capsys, "save-init", *words)
    assert lines[0] == "error: `--source-layout levanter` has no effect for ./step-3"
    assert lines[-1].endswith("remove `--source-layout`")


@pytest.mark.slow
@pytest.mark.usefixtures("levanter_step")
def test_layout_is_part_of_the_recorded_request():
    run_ok("save-init", "./step-3", *CONFIG, *LAYOUT, "--out", "init")
    assert "--source-layout levanter" in Path("init/prep-manifest.json").read_text()


@pytest.mark.usefixtures("levanter_step")
def test_names_of_torchtitan_are_forced_or_excluded(capsys: Capture):
    run_ok("export", "./model", "--layout", "torchtitan", "--out", "out")
    Path("out/prep-manifest.json").unlink()
    run_ok("export", "./out", "--source-layout", "torchtitan", "--out", "back")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))
    capsys.readouterr()
    lines = error_lines(capsys, "export", "./out", "--source-layout", "hf", "--out", "other")
    assert "tok_embeddings.weight" in " ".join(lines)
    lines = error_lines(capsys, "export", "./out", *LAYOUT, "--out", "other")
    assert lines[0] == "error: `--source-layout levanter` is unknown for DCP"
