"""Encoded Orbax items in a bucket: compressed, sharded, inline and omitted chunks, and trees with a scale."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.orbax_chunks import unplaced_array
from tests.helpers.orbax_items import random_array
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.store_sites import StoreSite, read_files
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.zarr_items import STORAGE_FORMS, write_zarr_item

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model `m` and its init `init` with compressed chunks."""
    folder = tmp_path_factory.mktemp("home")
    make_checkpoint(folder / "m", GPT_NEO, "bfloat16")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(folder)
        run_ok("save-init", "./m", "--mesh", "1,2,2", "--pad-vocab", "8", "--compress", "zstd:3",
               "--out", "init")  # fmt: skip
    return folder


def _upload(site: StoreSite, folder: Path, prefix: str) -> None:
    for path, data in read_files(folder).items():
        site.store.store(f"bucket/{prefix}/{path}", data)


def test_commands_read_a_compressed_init_from_a_bucket(site: StoreSite, home: Path):
    site.store.faults.rate, site.store.faults.kinds = 0.1, ("drop", "busy", "short")
    report = site.run_prep("inspect", "s3://bucket/init")
    assert (report["ok"], report["source"]["format"]) == (True, "orbax"), report
    for words in (("s3://bucket/init",), ("gs://bucket/init", str(home / "m"))):
        report = site.run_prep("verify", *words)
        assert (report["ok"], report.get("differences", [])) == (True, []), report
    words = ("--mesh", "1,4,1", "--out", "wide", "--memory", "32MiB")
    report = site.run_prep("reshard", "s3://bucket/init", *words)
    assert report["ok"], report
    assert site.run_prep("export", "gs://bucket/init", "--out", "hf")["ok"]
    assert_same(read_tensors(Path("hf")), read_tensors(home / "m"))
    params = prep.load_params("gs://bucket/init", "1,4,2", dtype="keep")
    tokens = np.asarray(params["embed"]["tokens"])[:131]
    assert tokens.tobytes() == read_tensors(home / "m")["transformer.wte.weight"].tobytes()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--layout", "hf"), marks=pytest.mark.slow),
        pytest.param(("--layout", "maxtext"), marks=pytest.mark.slow),
        pytest.param(("--layout", "levanter"), marks=pytest.mark.slow),
        pytest.param(("--layout", "torchtitan"), marks=pytest.mark.slow),
        ("--format", "dcp"),
    ],
)
def test_next_command_of_an_export_to_a_bucket_works(site: StoreSite, words: tuple[str, ...]):
    make_checkpoint(Path("llama"), GROUPED_QUERY | {"model_type": "llama"})
    run_ok("save-init", "./llama", "--out", "llama-init")
    report = site.run_prep("export", "llama-init", *words, "--out", "s3://bucket/out")
    assert report["next"] == "prep verify s3://bucket/out llama-init"
    assert site.run_prep(*report["next"].split()[1:])["differences"] == []


def test_next_command_reads_flax_files_from_a_bucket(site: StoreSite, home: Path):
    words = ("--layout", "hf-flax", "--out", "s3://bucket/out")
    report = site.run_prep("export", str(home / "init"), *words)
    assert report["ok"], report
    assert "s3://bucket/out" in report["next"]
    assert site.run_prep(*report["next"].split()[1:])["differences"] == []


def test_damaged_compressed_chunk_in_a_bucket_is_found(site: StoreSite, home: Path):
    data_file = max((home / "init/d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(data_file.read_bytes())
    data[len(data) // 2] ^= 1
    site.store.store(f"bucket/init/d/{data_file.name}", bytes(data))
    report = site.run_prep("verify", "s3://bucket/init")
    assert "bucket/init" in report["error"]["what"], report


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(("--chain",), marks=pytest.mark.slow),
        pytest.param(("m",), marks=pytest.mark.slow),
    ],
)
def test_damaged_checksum_file_in_a_bucket_is_named(
    site: StoreSite, home: Path, words: tuple[str, ...]
):
    data = bytearray((home / "init" / CHECKSUMS_FILE).read_bytes())
    data[0] ^= 1
    site.store.store(f"bucket/init/{CHECKSUMS_FILE}", bytes(data))
    against = [str(home / word) if word == "m" else word for word in words]
    report = site.run_prep("verify", "s3://bucket/init", *against)
    assert f"s3://bucket/init/{CHECKSUMS_FILE} is damaged" in json.dumps(report)
    assert "prep-remote-" not in json.dumps(report)


@pytest.mark.slow
def test_every_storage_form_is_read_from_a_bucket(site: StoreSite):
    arrays = {
        unplaced_array(("a",), (9, 7), "float32", (4, 4)): random_array("float32", (9, 7), 1),
        unplaced_array(("b", "c"), (5,), "int16", (2,)): random_array("int16", (5,), 2),
        unplaced_array(("zeros",), (6, 4), "float32", (2, 4)): np.zeros((6, 4), np.float32),
    }
    expected = {".".join(map(str, meta.path)): array for meta, array in arrays.items()}
    Path("expected").mkdir()
    save_file(expected, "expected/model.safetensors", {"format": "pt"})
    Path("expected/config.json").write_text('{"model_type": "unknown"}')
    for number, form in enumerate(STORAGE_FORMS):
        write_zarr_item(Path(f"item{number}"), arrays, form)
        _upload(site, Path(f"item{number}"), f"item{number}")
        report = site.run_prep("verify", f"s3://bucket/item{number}", "./expected")
        assert (report["ok"], report.get("differences")) == (True, []), (form, report)


@pytest.mark.parametrize("zarr3", slow_except([False, True], [True]))
@pytest.mark.parametrize("ocdbt", [False, True])
def test_items_of_orbax_are_loaded_from_a_bucket(site: StoreSite, zarr3: bool, ocdbt: bool):
    tree = {"weight": random_array("bfloat16", (64, 48), 1), "layer": {"bias": np.arange(24.0)}}
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, use_ocdbt=ocdbt, use_compression=True)
    ocp.Checkpointer(handler).save(Path("item").absolute(), args=ocp.args.PyTreeSave(tree))
    _upload(site, Path("item"), "item")
    params = prep.load_params("gs://bucket/item", dtype="keep", verbatim=True)
    assert np.asarray(params["weight"]).tobytes() == tree["weight"].tobytes()
    assert np.asarray(params["layer.bias"]).tobytes() == tree["layer"]["bias"].tobytes()


def test_scale_of_maxtext_is_undone_from_a_bucket(site: StoreSite):
    tensors = make_checkpoint(Path("llama"), GROUPED_QUERY | {"model_type": "llama"})
    run_ok("export", "./llama", "--layout", "maxtext", "--out", "maxtext")
    _upload(site, Path("maxtext"), "maxtext")
    report = site.run_prep("export", "s3://bucket/maxtext", "--out", "back")
    assert report["ok"], report
    assert_same(read_tensors(Path("back")), tensors)
    assert json.loads(Path("back/config.json").read_text())["model_type"] == "llama"
