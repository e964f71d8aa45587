"""`--storage` and `--compress`: Orbax restores each form, all commands read it, and its bytes are deterministic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine import files
from prepcli.execution.folder_output import FolderOutput
from prepcli.inspection.contents import read_contents
from prepcli.sources.locate import locate
from prepcli.sources.openers import orbax_item as item_opener
from prepcli.targets import orbax_item
from tests.helpers.damage import flip_bit, flip_used_bit, largest_file
from tests.helpers.killing import read_files
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    GROUPED_QUERY,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.tiny_configs import MIXTRAL, QWEN3_MOE
from tests.prepcli.formats.test_orbax import run_orbax

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


READ_FORMS = [(form, GPT_NEO, "bfloat16") for form in FORMS] + [("ocdbt zstd", LLAMA, "float32")]


@pytest.mark.parametrize(
    ("form", "base", "dtype"),
    slow_except(READ_FORMS, lambda case: case[0] == "zarr3 zstd"),
)
def test_commands_read_each_form(form: str, base: dict[str, Any], dtype: str, capsys: Capture):
    tensors = make_checkpoint(Path("model"), base, dtype)
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
    assert_same(read_tensors(Path("back")), tensors)
    params = prep.load_params("out", "1,2,4", dtype="keep")
    tokens = np.asarray(params["embed"]["tokens"])[:131]
    name = "transformer.wte.weight" if base is GPT_NEO else "model.embed_tokens.weight"
    assert tokens.tobytes() == tensors[name].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", slow_except(["ocdbt zstd", "files", "files zstd", "zarr3"], ["zarr3"])
)
def test_bytes_do_not_depend_on_memory_and_workers(form: str, model: dict[str, np.ndarray]):
    save(form, "a")
    save(form, "b", "--memory", "32MiB")
    save(form, "c", "--memory", "128MiB", "--workers", "2")
    assert read_files(Path("a")) == read_files(Path("b")) == read_files(Path("c"))


@pytest.mark.parametrize("form", slow_except(["ocdbt zstd", "files", "files zstd"], ["ocdbt zstd"]))
def test_unpublished_output_resumes(
    form: str, model: dict[str, np.ndarray], monkeypatch: MonkeyPatch
):
    save(form, "whole")
    with monkeypatch.context() as patched:
        patched.setattr(FolderOutput, "publish", lose_power)
        assert main(["save-init", "./model", *MESH, *FORMS[form], "--out", "out", "-q"]) == 1
    if form == "ocdbt zstd":
        # The rest of a compressed output needs no space.
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    save(form)
    assert read_files(Path("out")) == read_files(Path("whole"))


def lose_power(*_: object) -> None:
    raise PrepError("the power is gone")


@pytest.mark.parametrize(
    ("form", "document", "separator"),
    slow_except(
        [("files", ".zarray", "."), ("zarr3-files", "zarr.json", "/")],
        [("zarr3-files", "zarr.json", "/")],
    ),
)
def test_each_chunk_is_a_file_of_its_leaf(
    form: str, document: str, separator: str, model: dict[str, np.ndarray]
):
    save(form)
    manifest = read_json("out/prep-manifest.json")
    assert manifest["storage"] == form
    assert not Path("out/d").exists()
    for name, leaf in manifest["leaves"].items():
        counts = [-(-n // chunk) for n, chunk in zip(leaf["shape"], leaf["chunk"])]
        first = ("c",) if separator == "/" else ()
        expected = {separator.join(map(str, (*first, *index))) for index in np.ndindex(*counts)}
        assert read_files(Path("out") / name).keys() == {document, *expected}


@pytest.mark.parametrize(
    "form",
    slow_except(["ocdbt zstd", "files", "zarr3", "zarr3-files"], ["zarr3-files"]),
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


@pytest.mark.slow
def test_limit_of_kept_files_does_not_change_the_output(
    model: dict[str, np.ndarray], monkeypatch: MonkeyPatch
):
    save("files", "a")
    monkeypatch.setattr(files, "MAX_KEPT_FILES", 5)
    monkeypatch.setattr(item_opener, "MAX_OPEN_FILES", 5)
    save("files", "b")
    assert read_files(Path("a")) == read_files(Path("b"))
    run_ok("verify", "b", "./model")


def test_compression_ratio_is_reported(model: dict[str, np.ndarray], capsys: Capture):
    assert main(["save-init", "./model", "--out", "packed", "--compress", "zstd", "--json"]) == 0
    output = capsys.readouterr()
    compression = json.loads(output.out)["compress"]
    stored = sum(read_json("packed/prep-manifest.json")["packed"].values())
    ratio = round(stored / compression["raw"], 4)
    assert compression == {
        "with": "zstd:1",
        "raw": compression["raw"],
        "stored": stored,
        "ratio": ratio,
    }
    assert f"{ratio:.2f} x, with zstd:1" in output.err


def test_unknown_compression_is_a_usage_error(model: dict[str, np.ndarray], capsys: Capture):
    error = run_failing(capsys, 2, "save-init", "./model", "--compress", "unknown")
    assert "zstd, and zstd:1 to zstd:19" in error


@pytest.mark.parametrize(
    ("layout", "storage"),
    slow_except(
        [("maxtext", "zarr3-files"), ("maxtext-unscanned", "zarr3"), ("tunix", "files")],
        [("tunix", "files")],
    ),
)
def test_trainer_export_in_each_storage_is_restored_and_read_back(layout: str, storage: str):
    tensors = make_checkpoint(Path("model"), GROUPED_QUERY | {"model_type": "llama"})
    run_ok("export", "./model", "--layout", layout, "--out", "database")
    run_ok("export", "./model", "--layout", layout, "--storage", storage, "--out", "out")
    item = "0/model_params" if layout == "tunix" else "0/items"
    metadata = read_json(f"out/{item}/_METADATA")
    assert metadata["use_ocdbt"] is (storage == "zarr3")
    assert metadata["use_zarr3"] is (storage != "files")
    database, out = (Path(folder, item).absolute() for folder in ("database", "out"))
    assert not run_orbax("same", database, out)
    run_ok("verify", "out", "./model")
    run_ok("save-init", "./out", "--out", "again")
    run_ok("export", "again", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_storage_of_a_layout_without_an_item_is_refused(
    model: dict[str, np.ndarray], capsys: Capture
):
    words = ("export", "./model", "--layout", "hf-flax", "--storage", "zarr3")
    error = run_failing(capsys, 2, *words)
    assert "`--storage zarr3` is not supported with `--layout hf-flax`" in error
    assert "maxtext" in error


# Items with several experts in a chunk, where one expert a chunk would be more chunks than an index holds


def save_joined(monkeypatch: MonkeyPatch, **options: Any) -> None:
    """Write `joined`, an item with fewer chunks than one per expert."""
    with monkeypatch.context() as context:
        context.setattr(orbax_item, "MAX_ENTRIES", 20)
        prep.save_init("./model", "joined", **options)


def expert_chunks(folder: str) -> set[tuple[int, ...]]:
    """Return the layers and experts of a chunk of each leaf [layers, experts, ...]."""
    shapes: set[tuple[int, ...]] = set()
    for entry in read_contents(locate(folder)).entries:
        if entry.name.startswith("params.layers.mlp."):
            shapes.add(entry.placement[0].array.chunk_shape[:2])
    return shapes


@pytest.mark.parametrize("mesh", slow_except([None, "1,2,1"], ["1,2,1"]))
@pytest.mark.parametrize(
    ("config", "experts"), slow_except([(MIXTRAL, 3), (QWEN3_MOE, 5)], [(MIXTRAL, 3)])
)
def test_joined_experts_have_the_same_values(
    config: dict[str, Any], experts: int, mesh: str | None, monkeypatch: MonkeyPatch
):
    make_checkpoint(Path("model"), config)
    options: Any = {"mesh": mesh, "pad_vocab": "auto" if mesh else "no"}
    prep.save_init("./model", "single", **options)
    save_joined(monkeypatch, **options)
    assert expert_chunks("single") == {(1, 1)}
    assert expert_chunks("joined") == {(1, experts)}
    assert prep.verify("joined")
    assert prep.verify("joined", against="single")
    prep.export("joined", "exported")
    assert_same(read_tensors(Path("exported")), read_tensors(Path("model")))
    assert not run_orbax("same", Path("single").absolute(), Path("joined").absolute())


def test_joined_experts_load_on_a_mesh(monkeypatch: MonkeyPatch):
    make_checkpoint(Path("model"), QWEN3_MOE)
    save_joined(monkeypatch)
    loaded = prep.load_params("joined", "8,1,1")
    expected = prep.load_params("./model", "8,1,1")
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
