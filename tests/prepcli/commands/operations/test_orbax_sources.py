"""Orbax items: checkpoints of other programs, `--source-layout`, `--storage` and `--compress`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.algebra.boxes import full_box
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.execution.folder_output import FolderOutput
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import read_item
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array
from prepcli.inspection.contents import read_contents
from prepcli.restore import item_reader
from prepcli.sources.locate import locate
from prepcli.sources.openers import orbax_item as item_opener
from prepcli.targets import orbax_item
from tests.helpers.damage import flip_bit, flip_used_bit, largest_file
from tests.helpers.killing import read_files
from tests.helpers.levanter_trees import TREES as LEVANTER_TREES
from tests.helpers.levanter_trees import write_levanter
from tests.helpers.native_trees import array_metas, expected_leaves
from tests.helpers.orbax_items import write_metadata
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    error_lines,
    exported_tensors,
    run_failing,
    run_json,
    run_ok,
)
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
from tests.helpers.tiny_configs import MIXTRAL
from tests.helpers.zarr_items import STORAGE_FORMS, StorageForm, write_zarr_item
from tests.prepcli.formats.test_orbax import run_orbax

ZSTD = StorageForm(codec_names=("zstd",))
CHUNK_FILES = StorageForm(ocdbt=False)


def native_leaves(
    base: dict[str, Any], tensors: dict[str, np.ndarray], scan: bool, axis: int
) -> dict[str, np.ndarray]:
    """Return the leaves of prep's native tree without padding, by path below `params`."""
    config = {**base, "vocab_size": 131}
    leaves = expected_leaves(config, tensors, scan, axis)
    cut = {name: leaf[:131] if leaf.shape[:1] == (136,) else leaf for name, leaf in leaves.items()}
    return {name.removeprefix("params."): np.ascontiguousarray(leaf) for name, leaf in cut.items()}


def flax_leaves(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the leaves of the Flax model of transformers, renamed by the rules of that library."""
    leaves = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if tensor.ndim == 1:
            leaves[name] = tensor
        elif stem.endswith("embed_tokens"):
            leaves[f"{stem}.embedding"] = tensor
        else:
            leaves[f"{stem}.kernel"] = np.ascontiguousarray(tensor.T)
    return leaves


def check_conversions(source: str, tensors: dict[str, np.ndarray], *more: str) -> None:
    """Check the tensors of a source after save-init and after export."""
    run_ok("save-init", source, "--out", "init", *more)
    run_ok("verify", "init")
    run_ok("verify", "init", "./model")
    run_ok("export", source, "--out", "back", *more)
    actual = read_tensors(Path("back"))
    assert actual.keys() == tensors.keys()
    assert all(same_bits(actual[name], tensors[name]) for name in tensors)


def is_fast_form(form: StorageForm) -> bool:
    """Return whether the default suite has the form. `test_read_item_supports_every_storage_form` reads all forms."""
    return (len(form.codec_names) > 1 and form.chunks_per_shard != 1) or form == CHUNK_FILES


@pytest.mark.parametrize("form", slow_except(STORAGE_FORMS, is_fast_form), ids=str)
def test_all_orbax_storage_forms_convert(tmp_path: Path, form: StorageForm):
    tensors = make_checkpoint(tmp_path / "model", GPT_NEO)
    leaves = native_leaves(GPT_NEO, tensors, True, 0)
    write_zarr_item(tmp_path / "item", array_metas(leaves, "params.", 2), form)
    run_ok("save-init", "./item", "--config", "./model", "--out", "init")
    run_ok("verify", "init", "./model")
    assert_same(exported_tensors("init"), tensors)


@pytest.mark.parametrize(
    ("root", "scan", "axis"),
    [("", True, 0), ("params.", True, 1), ("params.params.", False, 0)],
)
def test_native_tree_without_manifest_converts(tmp_path: Path, root: str, scan: bool, axis: int):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = native_leaves(LLAMA, tensors, scan, axis)
    write_zarr_item(tmp_path / "item", array_metas(leaves, root), ZSTD)
    check_conversions("./item", tensors, "--config", "./model/config.json")


def test_redco_checkpoint_converts(tmp_path: Path):
    """Parameters of a Flax model next to an optimizer state and a pickle. The pickle is never opened."""
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = flax_leaves(tensors)
    write_zarr_item(tmp_path / "last/params", array_metas(leaves, "", 3), ZSTD)
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
    metas = array_metas(leaves, "params.") | array_metas(state)
    form = StorageForm(zarr3=True, chunks_per_shard=2)
    write_zarr_item(tmp_path / "run/100/state", metas, form)
    assert main(["save-init", "./run", "--config", "./model", "--out", "init", "--json"]) == 0
    output = capsys.readouterr()
    assert "optimizer state (" in output.err
    dropped = json.loads(output.out)["accounting"]["dropped"]
    rules = {entry["name"]: entry["rule"] for entry in dropped}
    assert rules == {"opt_state": "optimizer state", "step": "training state"}
    run_ok("verify", "init", "./model")


def test_reshard_reads_foreign_orbax_tree(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas(flax_leaves(tensors)), ZSTD)
    options = ("--config", "./model", "--mesh", "1,4,1", "--no-scan")
    run_ok("reshard", "./item", *options, "--out", "wide")
    run_ok("verify", "wide", "./model")
    assert_same(exported_tensors("wide"), tensors)


@pytest.mark.parametrize("place", ["item/hf", "."])
def test_config_is_found_near_the_item(tmp_path: Path, place: str):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas(native_leaves(LLAMA, tensors, True, 0)), ZSTD)
    (tmp_path / place).mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copyfile(tmp_path / "model" / name, tmp_path / place / name)
    (tmp_path / place / "notes.txt").write_text("not of the model")
    run_ok("save-init", "./item", "--out", "init")
    copied = {path.name for path in (tmp_path / "init/hf").iterdir()}
    assert copied == {"config.json", "tokenizer_config.json"}


def test_orbax_tree_of_no_model_is_rejected(tmp_path: Path, capsys: Capture):
    make_checkpoint(tmp_path / "model", LLAMA)
    write_zarr_item(tmp_path / "item", array_metas({"w": np.ones((3, 4), np.float32)}), ZSTD)
    error = run_failing(capsys, 1, "save-init", "./item", "--no-verbatim")
    assert "--config FOLDER" in error
    error = run_failing(capsys, 1, "save-init", "./item", "--config", "./model")
    assert "has no known layout" in error


def test_missing_leaf_is_named(tmp_path: Path, capsys: Capture):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    leaves = native_leaves(LLAMA, tensors, True, 0)
    del leaves["layers.attn.q.weight"]
    write_zarr_item(tmp_path / "item", array_metas(leaves), ZSTD)
    error = run_failing(capsys, 1, "save-init", "./item", "--config", "./model")
    assert "model.layers.0.self_attn.q_proj.weight" in error


def test_damaged_chunk_stops_conversion(tmp_path: Path, capsys: Capture):
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    form = StorageForm(ocdbt=False, codec_names=("zstd",))
    leaves = native_leaves(LLAMA, tensors, True, 0)
    write_zarr_item(tmp_path / "item", array_metas(leaves), form)
    chunk = tmp_path / "item/layers.mlp.up.weight/0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:50])
    stderr = run_failing(capsys, 1, "save-init", "./item", "--config", "./model", "--out", "init")
    assert "chunk 0.0.0 of `layers.mlp.up.weight`" in stderr
    assert not (tmp_path / "init").exists()


def test_changed_inline_source_is_detected(tmp_path: Path, capsys: Capture):
    def item(tensors: dict[str, np.ndarray]) -> None:
        shutil.rmtree(tmp_path / "item", ignore_errors=True)
        form = StorageForm(codec_names=("zstd",), max_inline_nbytes=1 << 20)
        leaves = native_leaves(LLAMA, tensors, True, 0)
        write_zarr_item(tmp_path / "item", array_metas(leaves), form)

    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    item(tensors)
    run_ok("save-init", "./item", "--config", "./model", "--out", "init")
    item({name: tensor + 1 for name, tensor in tensors.items()})
    error = run_failing(capsys, 1, "save-init", "./item", "--config", "./model", "--out", "init")
    assert "from a source that has changed since" in error


@pytest.mark.slow
def test_many_files_are_read_with_few_open(tmp_path: Path, monkeypatch: MonkeyPatch):
    for module in (item_opener, item_reader):
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
    leaves = native_leaves(LLAMA, tensors, True, 0)
    write_zarr_item(tmp_path / "item", array_metas(leaves, "params.", 2), ZSTD)
    run_ok("inspect", "./item", "--stats", "--json")
    entries = json.loads(capsys.readouterr().out)["tensors"]
    norm = next(entry for entry in entries if entry["name"] == "params.final_norm.scale")
    assert norm["stats"]["max"] == tensors["model.norm.weight"].max()
    assert norm["chunks"] == 2
    run_ok("inspect", "./item")
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
def test_named_layout_is_read():
    run_ok("save-init", "./step-3", *CONFIG, *LAYOUT, "--out", "init")
    assert "--source-layout levanter" in Path("init/prep-manifest.json").read_text()
    run_ok("verify", "init", "./model")
    assert_same(exported_tensors("init"), read_tensors(Path("model")))


@pytest.mark.usefixtures("levanter_step")
def test_export_reads_one_layout_and_writes_another():
    run_ok("export", "./step-3", *CONFIG, *LAYOUT, "--layout", "easylm", "--out", "out")
    run_ok("export", "out", "--source-layout", "easylm", "--out", "back")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


@pytest.mark.usefixtures("levanter_step")
def test_verify_and_inspect_read_the_named_layout(capsys: Capture):
    run_ok("verify", "./step-3", "./model", *CONFIG, *LAYOUT)
    run_ok("inspect", "./step-3", *CONFIG, *LAYOUT)
    assert "model.layers.2.self_attn.q_proj.weight" in capsys.readouterr().out


# Command | error | part of its last line
REFUSED_LAYOUTS = """
save-init ./step-3 --source-layout tunix --config model | contradicts | `--source-layout levanter`
inspect ./step-3 --source-layout tunix --config model | contradicts | `--source-layout levanter`
save-init ./model --source-layout levanter | contradicts | hint:
save-init ./step-3 --source-layout levanter | has no effect for | `--config FOLDER`
save-init ./step-3 --source-layout levanter --config model --verbatim | has no effect for | remove `--source-layout`
save-init ./step-3 --source-layout levanter --config model --map a.map | has no effect for | remove `--source-layout`
"""


@pytest.mark.usefixtures("levanter_step")
@pytest.mark.parametrize("row", REFUSED_LAYOUTS.strip().splitlines())
def test_layout_that_does_not_fit_is_refused(row: str, capsys: Capture):
    command, error, hint = row.split(" | ")
    Path("a.map").write_text("norm.weight: embed <- model.transformer.norm.weight: embed\n")
    words = command.split()
    lines = error_lines(capsys, *words)
    assert lines[0] == f"error: `--source-layout {words[3]}` {error} {words[1]}"
    assert hint in lines[-1]
    assert not Path("init").exists()


@pytest.mark.usefixtures("levanter_step")
def test_unknown_layout_lists_those_of_the_family(capsys: Capture):
    lines = error_lines(capsys, "save-init", "./step-3", *CONFIG, "--source-layout", "levnter")
    assert lines[0] == "error: `--source-layout levnter` is unknown for llama"
    text = " ".join(" ".join(lines).split())
    assert "its layouts are native, hf-flax, easylm, easylm-scanned, tunix, maxtext" in text
    assert "did you mean `levanter`?" in text


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


# `--storage` and `--compress`: Orbax restores each form, all commands read it, and its bytes are deterministic.


MESH = ("--mesh", "1,2,4", "--pad-vocab", "8")
FORMS: dict[str, tuple[str, ...]] = {
    "ocdbt zstd": ("--compress", "zstd:3"),
    "files": ("--storage", "files"),
    "files zstd": ("--storage", "files", "--compress", "zstd"),
    "zarr3": ("--storage", "zarr3"),
    "zarr3 zstd": ("--storage", "zarr3", "--compress", "zstd:5"),
    "zarr3-files": ("--storage", "zarr3-files"),
    "zarr3-files zstd": ("--storage", "zarr3-files", "--compress", "zstd:9"),
}
KEYS = "params.layers.attn.k.weight"


@pytest.fixture
def model() -> dict[str, np.ndarray]:
    return make_checkpoint(Path("model"), GPT_NEO, "bfloat16")


def save(form: str, out: str = "out", *more: str) -> None:
    run_ok("save-init", "./model", *MESH, *FORMS[form], "--out", out, *more)


def read_json(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("form", slow_except(FORMS, ["ocdbt zstd", "files", "zarr3-files zstd"]))
def test_orbax_restores_the_same_tree_from_each_form(form: str, model: dict[str, np.ndarray]):
    run_ok("save-init", "./model", *MESH, "--out", "raw")
    save(form)
    metadata = read_json("out/_METADATA")
    storage = form.split()[0]
    assert metadata["use_zarr3"] is storage.startswith("zarr3")
    assert metadata["use_ocdbt"] is not storage.endswith("files")
    assert Path("out/manifest.ocdbt").exists() is not storage.endswith("files")
    assert not run_orbax("same", Path("raw").absolute(), Path("out").absolute())


def test_orbax_restores_zarr3_without_a_target(model: dict[str, np.ndarray]):
    save("zarr3")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        tree = checkpointer.restore(Path("out").absolute())
    embedding = tree["params"]["embed"]["tokens"][:131]
    assert embedding.tobytes() == model["transformer.wte.weight"].tobytes()


@pytest.mark.parametrize("form", slow_except(FORMS, ["zarr3 zstd"]))
def test_commands_read_each_form(form: str, model: dict[str, np.ndarray], capsys: Capture):
    save(form)
    for words in ((), ("./model",), ("--chain",)):
        run_ok("verify", "out", *words)
    assert run_json(capsys, "inspect", "out")["source"]["mesh"] == "1,2,4"
    run_ok("reshard", "out", "--no-scan", *FORMS[form], "--out", "unstacked")
    run_ok("reshard", "unstacked", "--scan", "--storage", "ocdbt", "--out", "database")
    assert Path("database/manifest.ocdbt").exists()
    for folder in ("unstacked", "database"):
        run_ok("verify", folder, "./model")
    run_ok("export", "unstacked", "--out", "back")
    assert_same(read_tensors(Path("back")), model)
    params = prep.load_params("out", "1,2,4", dtype="keep")
    tokens = np.asarray(params["embed"]["tokens"])[:131]
    assert tokens.tobytes() == model["transformer.wte.weight"].tobytes()


def test_unpublished_output_resumes(model: dict[str, np.ndarray], monkeypatch: MonkeyPatch):
    form = "ocdbt zstd"
    save(form, "whole")
    with monkeypatch.context() as patched:
        patched.setattr(FolderOutput, "publish", lose_power)
        assert main(["save-init", "./model", *MESH, *FORMS[form], "--out", "out", "-q"]) == 1
    # The rest of a compressed output needs no space.
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    save(form)
    assert read_files(Path("out")) == read_files(Path("whole"))


def lose_power(*_: object) -> None:
    raise PrepError("the power is gone")


def test_each_chunk_is_a_file_of_its_leaf(model: dict[str, np.ndarray]):
    save("zarr3-files")
    manifest = read_json("out/prep-manifest.json")
    assert manifest["storage"] == "zarr3-files"
    assert not Path("out/d").exists()
    for name, leaf in manifest["leaves"].items():
        counts = [-(-n // chunk) for n, chunk in zip(leaf["shape"], leaf["chunk"])]
        expected = {"/".join(map(str, ("c", *index))) for index in np.ndindex(*counts)}
        assert read_files(Path("out") / name).keys() == {"zarr.json", *expected}


@pytest.mark.parametrize(
    "form", slow_except(["ocdbt zstd", "files", "zarr3", "zarr3-files"], ["zarr3-files"])
)
def test_verify_finds_a_flipped_bit(form: str, model: dict[str, np.ndarray], capsys: Capture):
    save(form)
    if form.endswith("files"):
        chunk = "1.0.0.0" if form == "files" else "c/1/0/0/0"
        flip_bit(Path("out", KEYS, chunk), 7)
    else:
        flip_used_bit(largest_file(Path("out/d")))
    error = run_failing(capsys, 1, "verify", "out")
    assert "layers.attn.k.weight" in error or not form.endswith("files")


def test_missing_chunk_file_is_damage(model: dict[str, np.ndarray], capsys: Capture):
    save("files")
    Path("out", KEYS, "1.0.0.0").unlink()
    error = run_failing(capsys, 1, "verify", "out")
    assert f"chunk 1.0.0.0 of `{KEYS}` is missing" in error
    again = ("save-init", "./model", *MESH, *FORMS["files"], "--out", "out")
    assert "its files are damaged" in run_failing(capsys, 1, *again)


def test_short_compressed_file_is_not_done(model: dict[str, np.ndarray], capsys: Capture):
    save("ocdbt zstd")
    words = ("save-init", "./model", *MESH, *FORMS["ocdbt zstd"], "--out", "out")
    assert main([*words]) == 0
    assert "already done" in capsys.readouterr().err
    name = next(iter(read_json("out/prep-manifest.json")["packed"]))
    Path("out", name).write_bytes(b"short")
    assert "its files are damaged" in run_failing(capsys, 1, *words)


def test_damaged_array_document_cannot_be_accepted(model: dict[str, np.ndarray], capsys: Capture):
    save("files")
    name = f"{KEYS}/.zarray"
    Path("out", name).write_text("{}")
    error = run_failing(capsys, 1, "verify", "out")
    assert f"{name} is damaged" in error
    assert "--accept" not in error
    assert main(["verify", "out", "--accept", name, "-q"]) != 0


def test_other_storage_is_another_output(model: dict[str, np.ndarray], capsys: Capture):
    run_ok("save-init", "./model", *MESH, "--out", "out")
    words = ("save-init", "./model", *MESH, "--storage", "files", "--out", "out")
    assert "exists and is something else" in run_failing(capsys, 1, *words)


def test_leaf_with_a_slash_in_its_name_is_refused(capsys: Capture):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "unknown"}))
    save_file({"a/b": np.ones((2, 3), np.float32)}, "model/model.safetensors")
    error = run_failing(capsys, 2, "save-init", "./model", "--storage", "files", "--out", "out")
    assert "`--storage files` cannot store `params.a/b`" in error
    assert "`--storage ocdbt` has no such limit" in error
    assert not Path("out.partial").exists()
    run_ok("save-init", "./model", "--out", "out")


def test_compression_ratio_is_reported(model: dict[str, np.ndarray], capsys: Capture):
    assert main(["save-init", "./model", "--out", "packed", "--compress", "zstd", "--json"]) == 0
    output = capsys.readouterr()
    compression = json.loads(output.out)["compress"]
    stored = sum(read_json("packed/prep-manifest.json")["packed"].values())
    ratio = round(stored / compression["raw"], 4)
    expected = {"with": "zstd:1", "raw": compression["raw"], "stored": stored, "ratio": ratio}
    assert compression == expected
    assert f"{ratio:.2f} x, with zstd:1" in output.err


def test_trainer_export_in_other_storage_is_read_back():
    tensors = make_checkpoint(Path("model"), GROUPED_QUERY | {"model_type": "llama"})
    run_ok("export", "./model", "--layout", "tunix", "--out", "database")
    run_ok("export", "./model", "--layout", "tunix", "--storage", "files", "--out", "out")
    item = "0/model_params"
    metadata = read_json(f"out/{item}/_METADATA")
    assert (metadata["use_ocdbt"], metadata["use_zarr3"]) == (False, False)
    database, out = (Path(folder, item).absolute() for folder in ("database", "out"))
    assert not run_orbax("same", database, out)
    run_ok("verify", "out", "./model")
    run_ok("save-init", "./out", "--out", "again")
    run_ok("export", "again", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_unfit_storage_and_compression_are_refused(model: dict[str, np.ndarray], capsys: Capture):
    error = run_failing(capsys, 2, "save-init", "./model", "--compress", "unknown")
    assert "zstd, and zstd:1 to zstd:19" in error
    words = ("export", "./model", "--layout", "hf-flax", "--storage", "zarr3")
    error = run_failing(capsys, 2, *words)
    assert "`--storage zarr3` is not supported with `--layout hf-flax`" in error
    assert "maxtext" in error


# Items with several experts in a chunk, where one expert a chunk would be more chunks than an index holds


def expert_chunks(folder: str) -> set[tuple[int, ...]]:
    """Return the layers and experts of a chunk of each leaf [layers, experts, ...]."""
    shapes: set[tuple[int, ...]] = set()
    for entry in read_contents(locate(folder)).entries:
        if entry.name.startswith("params.layers.mlp."):
            shapes.add(entry.placement[0].array.chunk_shape[:2])
    return shapes


def test_joined_experts_have_the_same_values(monkeypatch: MonkeyPatch):
    make_checkpoint(Path("model"), MIXTRAL)
    options: Any = {"mesh": "1,2,1", "pad_vocab": "auto"}
    prep.save_init("./model", "single", **options)
    with monkeypatch.context() as context:
        context.setattr(orbax_item, "MAX_ENTRIES", 20)
        prep.save_init("./model", "joined", **options)
    assert expert_chunks("single") == {(1, 1)}
    assert expert_chunks("joined") == {(1, 3)}
    assert prep.verify("joined")
    assert prep.verify("joined", against="single")
    prep.export("joined", "exported")
    assert_same(read_tensors(Path("exported")), read_tensors(Path("model")))
    assert not run_orbax("same", Path("single").absolute(), Path("joined").absolute())
    loaded = prep.load_params("joined", "8,1,1")
    expected = prep.load_params("single", "8,1,1")
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
