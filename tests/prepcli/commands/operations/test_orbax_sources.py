"""Orbax checkpoints of other programs as sources: storage forms, trees, and the location of the config."""

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
from prepcli.planning.arrays import Array
from prepcli.restore import item_reader
from prepcli.sources.openers import orbax_item
from tests.helpers.orbax_items import write_metadata
from tests.helpers.run_cli import exported_tensors
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
    same_bits,
)
from tests.helpers.zarr_items import STORAGE_FORMS, StorageForm, write_zarr_item
from tests.prepcli.commands.operations.test_restore import expected_leaves

MODELS = {"gpt_neo": GPT_NEO, "llama": LLAMA}
ZSTD = StorageForm(codec_names=("zstd",))


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def array_metas(
    leaves: dict[str, np.ndarray], root: str = "", pieces: int = 1
) -> dict[Array, np.ndarray]:
    """Return each leaf with array metadata for `pieces` chunks along its first and last axes."""
    metas = {}
    for name, leaf in leaves.items():
        ends = {0, leaf.ndim - 1}
        chunk = tuple(-(-n // pieces) if axis in ends else n for axis, n in enumerate(leaf.shape))
        path = tuple(f"{root}{name}".split("."))
        metas[unplaced_array(path, leaf.shape, leaf.dtype.name, chunk)] = leaf
    return metas


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
    """Return whether the default suite has the form: all codecs together, with each of the other choices.

    `test_read_item_supports_every_storage_form` reads the codecs one by one.
    """
    return len(form.codec_names) != 1


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


@pytest.mark.parametrize(("family", "root", "scan", "axis"), slow_except(TREES, is_fast_tree))
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


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("pieces", [1, 3])
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


def test_training_state_is_dropped_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


@pytest.mark.parametrize("place", ["item", "item/hf", ".", "hf"])
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


def test_orbax_without_config_gets_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_zarr_item(tmp_path / "item", array_metas({"w": np.ones((3, 4), np.float32)}), ZSTD)
    run_prep("save-init", "./item", "--no-verbatim", code=1)
    assert "--config FOLDER" in capsys.readouterr().err


def test_orbax_tree_of_other_model_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas({"w": np.ones((3, 4), np.float32)}), ZSTD)
    run_prep("save-init", "./item", "--config", "./model", code=1)
    assert "has no known layout" in capsys.readouterr().err


def test_missing_leaf_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = native_leaves(LLAMA, tensors, True, 0)
    del leaves["layers.attn.q.weight"]
    write_zarr_item(tmp_path / "item", array_metas(leaves), ZSTD)
    run_prep("save-init", "./item", "--config", "./model", code=1)
    assert "model.layers.0.self_attn.q_proj.weight" in capsys.readouterr().err


def test_damaged_chunk_stops_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_changed_inline_source_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_many_files_are_read_with_few_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_inspect_reads_foreign_orbax_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
