"""Commands that read checkpoints from object stores, and encoded items and outputs for other trainers there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.core.errors import DamagedError, UsageError
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.sources.openers import orbax_item
from prepcli.stores import byte_ranges
from tests.helpers.fork_server import ForkedProcess
from tests.helpers.golden_inputs import provide
from tests.helpers.killing import read_files
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.orbax_items import random_array
from tests.helpers.run_cli import MonkeyPatch, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.store_sites import (
    MESH,
    WIDE,
    StoreSite,
    finish,
)
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT_NEO,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)

pytestmark = pytest.mark.waits
OUT = "s3://bucket/out"
READ_FAULTS = ("drop", "empty", "refuse", "busy", "limit", "short")
STORED = ("--storage", "files", "--out", "gs://bucket/files")


@pytest.mark.parametrize("words", [(), pytest.param(("--format", "dcp"), marks=pytest.mark.slow)])
def test_inspect_of_an_export_reads_no_weights(site: StoreSite, home: Path, words: tuple[str, ...]):
    report = site.run_prep("export", str(home / "init"), "--out", "out", *words)
    assert report["ok"], report
    for path, data in read_files(site.cwd / "out").items():
        site.store.objects[f"bucket/out/{path}"] = data
    site.store.sent.clear()
    report = site.run_prep("inspect", "gs://bucket/out")
    assert report["ok"], report
    # The files of weights have 13 MB, and are smaller than the limit of files to fetch whole.
    assert sum(sent.stop - sent.start for sent in site.store.sent) < 2 << 20


def test_verify_requests_each_small_file_once(site: StoreSite, home: Path):
    site.store.requests.clear()
    assert site.run_prep("verify", "gs://bucket/models/m", str(home / "m"))["ok"]
    small = [path.name for path in (home / "m").glob("*.json")]
    assert "generation_config.json" in small
    for name in small:
        assert site.store.requests.count(f"GET bucket/models/m/{name}") == 1, name


def test_commands_read_and_write_chunk_files_in_a_bucket(
    site: StoreSite, packed: Path, monkeypatch: MonkeyPatch
):
    upload(site, packed / "m", "m")
    monkeypatch.setattr(orbax_item, "MAX_OPEN_FILES", 3)
    site.store.faults.rate, site.store.faults.kinds = 0.1, READ_FAULTS
    report = site.run_prep("save-init", "gs://bucket/m", *MESH, *STORED)
    assert report["ok"], report.get("error")
    site.store.requests.clear()
    report = site.run_prep("inspect", "gs://bucket/files")
    assert report["ok"], report
    chunks = [line for line in site.store.requests if line.endswith("embed.tokens/0.0")]
    assert not chunks, "inspect reads no values"
    words = ("--mesh", "1,4,1", "--out", "wide", "--memory", "32MiB")
    report = site.run_prep("reshard", "gs://bucket/files", *words)
    assert report["ok"], report.get("error")
    for name in ("wide", "gs://bucket/files"):
        assert site.run_prep("verify", name, str(packed / "m"))["differences"] == []
    params = prep.load_params("gs://bucket/files")
    assert params["embed"]["tokens"].shape == (136, 32)
    report = site.run_prep("lock", "gs://bucket/files", "--out", "files.lock.json")
    assert report["ok"], report
    locked = json.loads(Path("files.lock.json").read_bytes())["files"]
    # Object stores publish no digests of large files.
    assert {entry.get("digest") for entry in locked.values()} > {None}


FORMATS = {
    "torch": ("torch",),
    "torch-sharded": ("torch-sharded",),
    "meta": ("meta",),
    "gguf": ("model.gguf", "--quantized", "dequantize"),
    "flax": ("flax",),
    "flax-sharded": ("flax-sharded",),
    "flax-t5": ("flax-t5",),
    "easylm": ("easylm-stream", "--config", "./easylm-config"),
    "dcp": ("dcp-plain", "--verbatim"),
    "mxfp4": ("q-mxfp4", "--quantized", "dequantize"),
    "multimodal": ("llava",),
    "prediction": ("prediction",),
    "verbatim": ("verbatim",),
}


@pytest.mark.parametrize("name", slow_except(FORMATS, ("torch", "gguf")))
def test_every_format_is_read_from_a_bucket(site: StoreSite, name: str):
    source, *options = FORMATS[name]
    for path in (source, *(["easylm-config"] if "--config" in options else [])):
        provide(path)
    local = Path(source)
    for path in [local] if local.is_file() else local.rglob("*"):
        if path.is_file():
            site.store.store(f"bucket/in/{path.as_posix()}", path.read_bytes())
    words = ("--storage", "files", "--memory", "64MiB", *options)
    report = site.run_prep("save-init", f"./{source}", "--out", "from-disk", *words)
    assert report["ok"], report.get("error")
    site.store.faults.rate, site.store.faults.kinds = 0.1, READ_FAULTS
    report = site.run_prep("save-init", f"gs://bucket/in/{source}", "--out", "streamed", *words)
    assert report["ok"], report.get("error")
    streamed, read = read_files(Path("streamed")), read_files(Path("from-disk"))
    assert streamed.keys() == read.keys()
    different = {file for file in read if streamed[file] != read[file]}
    # Both have the time of the command or of the source.
    assert different <= {"prep-manifest.json", "_CHECKPOINT_METADATA"}
    shown = site.run_prep("inspect", f"gs://bucket/in/{source}")
    assert shown["ok"], shown.get("error")
    assert shown["tensors"]


def test_transformers_does_not_load_a_url(site: StoreSite):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="cannot read gs://bucket/models/m"):
        prep.verify_logits("gs://bucket/models/m", library="transformers")


def test_damaged_small_file_in_bucket_has_a_hint(site: StoreSite):
    site.store.store("bucket/init/hf/config.json", b"{}")
    error = site.run_prep("verify", "gs://bucket/init")["error"]
    assert error["what"] == "gs://bucket/init/hf/config.json is damaged"
    assert error["hint"] == "upload hf/config.json again: `--accept` works on local outputs only"


def test_invalid_bucket_requests_are_errors(site: StoreSite, home: Path):
    model = str(home / "m")
    assert site.run_prep("save-init", model, "--out", "abfs://bucket/out")["error"]["code"] == 2
    assert site.run_prep("save-init", "gs://bucket/models/m", "--offline")["error"]["code"] == 2
    error = site.run_prep("inspect", "gs://bucket/models/m", "--revision", "main")["error"]
    assert error["code"] == 2
    error = site.run_prep("inspect", "gs://bucket/nothing")["error"]
    assert error["what"] == "gs://bucket/nothing holds no checkpoint"
    site.store.objects["bucket/bin/pytorch_model.bin"] = b"x"
    site.store.objects["bucket/bin/config.json"] = b"{}"
    error = site.run_prep("inspect", "gs://bucket/bin")["error"]
    assert error["what"] == "pytorch_model.bin is not a PyTorch file"
    dry = site.run_prep("save-init", model, "--out", "gs://bucket/out", "--dry-run")
    assert (dry["ok"], dry["output"]) == (True, "gs://bucket/out")
    assert site.writes() == []
    assert list(site.cwd.iterdir()) == []


@pytest.mark.usefixtures("small_objects")
@pytest.mark.parametrize("storage", slow_except(["ocdbt", "files", "zarr3-files"], ["ocdbt"]))
def test_compressed_output_is_written_from_memory(site: StoreSite, home: Path, storage: str):
    """Two processes, without a local file. TensorStore reads the objects."""
    words = ("save-init", str(home / "m"), *MESH, "--storage", storage)
    assert site.run_prep(*words, "--out", "raw", "--processes", "1/0")["ok"]
    site.store.write_faults.rate = 0.1
    running: list[ForkedProcess] = []
    for index in range(2):
        share = ("--processes", f"2/{index}", "--out", "gs://bucket/out")
        running.append(site.start_prep(*words, "--compress", "zstd:3", *share, small_files=True))
    reports = [finish(process) for process in running]
    assert [report["ok"] for report in reports] == [True, True], reports
    site.store.write_faults.rate = 0
    written = site.store.objects_below("bucket/out/")
    assert sum(map(len, written.values())) < sum(map(len, read_files(Path("raw")).values()))
    assert [path.name for path in site.cwd.iterdir()] == ["raw"]
    for path, data in written.items():
        target = Path("downloaded", path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert restored_bytes(Path("downloaded")) == restored_bytes(Path("raw"))
    assert site.run_prep("verify", "downloaded", str(home / "m"))["ok"]


def restored_bytes(item: Path) -> dict[str, bytes]:
    """Restore an item with Orbax, and return the bytes of its leaves."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(item.absolute())
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.mark.usefixtures("small_objects")
@pytest.mark.parametrize("level", [pytest.param("zstd:9", marks=pytest.mark.slow), "zstd:1"])
def test_memory_of_compression_is_within_the_budget(site: StoreSite, level: str):
    """Chunks of 32 MiB, which are compressed in several pieces."""
    make_checkpoint(site.cwd / "wide", **WIDE)
    words = ("save-init", "./wide", "--mesh", "1,1,1", "--out", "gs://bucket/out")
    report = site.run_process(*words, "--compress", level, "--memory", "128MiB", small_files=True)
    assert report["ok"], report
    assert report["memory"]["peak"] <= 128 << 20


@pytest.mark.usefixtures("small_objects")
def test_compression_with_too_little_memory_is_refused(site: StoreSite, home: Path):
    words = ("save-init", str(home / "m"), "--compress", "zstd:19", "--memory", "64MiB")
    error = site.run_prep(*words, "--out", "gs://bucket/out")["error"]
    assert error["what"].endswith("is too small for the adapter, the new tokens or the compression")
    assert site.writes() == []


# Encoded Orbax items in a bucket: compressed, sharded, inline and omitted chunks, and trees with a scale


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small model `m` and its init `packed` with compressed chunks."""
    folder = tmp_path_factory.mktemp("packed")
    make_checkpoint(folder / "m", GPT_NEO, "bfloat16")
    with chdir(folder):
        run_ok("save-init", "./m", *MESH, "--compress", "zstd:3", "--out", "packed")
    return folder


@pytest.fixture
def packed_site(site: StoreSite, packed: Path) -> StoreSite:
    upload(site, packed / "packed", "packed")
    return site


def upload(site: StoreSite, folder: Path, prefix: str) -> None:
    for path, data in read_files(folder).items():
        site.store.store(f"bucket/{prefix}/{path}", data)


def flip_in_store(store: FakeObjectStore, key: str, index: int) -> None:
    data = bytearray(store.objects[key])
    data[index] ^= 1
    store.store(key, bytes(data))


def test_commands_read_a_compressed_init_from_a_bucket(packed_site: StoreSite, packed: Path):
    site = packed_site
    site.store.faults.rate, site.store.faults.kinds = 0.1, ("drop", "busy", "short")
    report = site.run_prep("inspect", "s3://bucket/packed")
    assert (report["ok"], report["source"]["format"]) == (True, "orbax"), report
    for words in (("s3://bucket/packed",), ("gs://bucket/packed", str(packed / "m"))):
        report = site.run_prep("verify", *words)
        assert (report["ok"], report.get("differences", [])) == (True, []), report
    words = ("--mesh", "1,4,1", "--out", "wide", "--memory", "32MiB")
    report = site.run_prep("reshard", "s3://bucket/packed", *words)
    assert report["ok"], report
    assert site.run_prep("export", "gs://bucket/packed", "--out", "hf")["ok"]
    assert_same(read_tensors(Path("hf")), read_tensors(packed / "m"))
    params = prep.load_params("gs://bucket/packed", "1,4,2", dtype="keep")
    tokens = np.asarray(params["embed"]["tokens"])[:131]
    assert tokens.tobytes() == read_tensors(packed / "m")["transformer.wte.weight"].tobytes()


def test_chain_in_a_bucket_is_proven(site: StoreSite, packed: Path):
    first = str(packed / "m")
    padded = ("pad-vocab", first, "--multiple", "8", "--out", "gs://bucket/padded")
    assert site.run_prep(*padded)["ok"]
    assert site.run_prep("save-init", "gs://bucket/padded", "--out", "gs://bucket/new")["ok"]
    proof = prep.verify_chain("gs://bucket/new")
    assert proof
    assert [(link.output, link.source) for link in proof.links] == [
        ("gs://bucket/new", "gs://bucket/padded"),
        ("gs://bucket/padded", first),
    ]
    del site.store.objects["bucket/padded/model-00001-of-00003.safetensors"]
    broken = prep.verify_chain("gs://bucket/new").broken_link
    assert broken is not None
    assert broken.source == "gs://bucket/padded"


@pytest.mark.parametrize("words", [("--format", "dcp"), ("--layout", "hf-flax")])
def test_next_command_of_an_export_to_a_bucket_works(
    site: StoreSite, packed: Path, words: tuple[str, ...]
):
    report = site.run_prep("export", str(packed / "packed"), *words, "--out", OUT)
    assert report["ok"], report
    assert OUT in report["next"]
    assert site.run_prep(*report["next"].split()[1:])["differences"] == []


def test_damaged_compressed_chunk_in_a_bucket_is_found(packed_site: StoreSite):
    objects = packed_site.store.objects
    keys = [key for key in objects if key.startswith("bucket/packed/d/")]
    key = max(keys, key=lambda key: len(objects[key]))
    flip_in_store(packed_site.store, key, len(objects[key]) // 2)
    report = packed_site.run_prep("verify", "s3://bucket/packed")
    assert "bucket/packed" in report["error"]["what"], report


def test_damaged_checksum_file_in_a_bucket_is_named(packed_site: StoreSite):
    flip_in_store(packed_site.store, f"bucket/packed/{CHECKSUMS_FILE}", 0)
    report = packed_site.run_prep("verify", "s3://bucket/packed")
    assert f"s3://bucket/packed/{CHECKSUMS_FILE} is damaged" in json.dumps(report)
    assert "prep-remote-" not in json.dumps(report)


@pytest.mark.parametrize("zarr3", slow_except([False, True], [True]))
@pytest.mark.parametrize("ocdbt", [False, True])
def test_items_of_orbax_are_loaded_from_a_bucket(site: StoreSite, zarr3: bool, ocdbt: bool):
    tree = {"weight": random_array("bfloat16", (64, 48), 1), "layer": {"bias": np.arange(24.0)}}
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, use_ocdbt=ocdbt, use_compression=True)
    ocp.Checkpointer(handler).save(Path("item").absolute(), args=ocp.args.PyTreeSave(tree))
    upload(site, Path("item"), "item")
    params = prep.load_params("gs://bucket/item", dtype="keep", verbatim=True)
    assert np.asarray(params["weight"]).tobytes() == tree["weight"].tobytes()
    assert np.asarray(params["layer.bias"]).tobytes() == tree["layer"]["bias"].tobytes()


# Outputs for other trainers in an object store: written, checked and converted back without a changed bit
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED_QUERY | {"model_type": "llama", "head_dim": 8},
    "gemma3": GROUPED_QUERY | {"model_type": "gemma3_text", "num_hidden_layers": 7},
    "gpt_oss": FAMILY_CONFIGS["gpt_oss"] | {"model_type": "gpt_oss"},
}
CASES = {
    "maxtext llama": ("maxtext", "llama"),
    "maxtext gemma3": ("maxtext", "gemma3"),
    "torchtitan llama": ("torchtitan", "llama"),
    "torchtitan gpt_oss": ("torchtitan", "gpt_oss"),
}


@pytest.fixture
def store(monkeypatch: MonkeyPatch) -> Iterator[FakeObjectStore]:
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    with use_objects(monkeypatch, {}) as store:
        yield store


@pytest.mark.parametrize("case", slow_except(CASES, ("maxtext gemma3",)))
def test_output_for_a_trainer_in_a_bucket_returns(store: FakeObjectStore, case: str):
    layout, model = CASES[case]
    tensors = make_checkpoint(Path("model"), MODELS[model], "bfloat16")
    # In float32, the way back of MaxText's scales returns every value.
    words = ("--dtype", "float32") if layout == "maxtext" else ()
    run_ok("export", "./model", "--layout", layout, *words, "--out", OUT)
    assert prep.verify(OUT)
    # The names of the tensors are those of Hugging Face.
    contents = prep.inspect(OUT)
    assert contents.parameters == sum(tensor.size for tensor in tensors.values())
    run_ok("save-init", OUT, "--dtype", "bfloat16", "--out", "init", "--mesh", "1,2,1")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("case", slow_except(CASES, ("torchtitan gpt_oss",)))
def test_changed_byte_of_a_bucket_is_found(store: FakeObjectStore, case: str):
    layout, model = CASES[case]
    make_checkpoint(Path("model"), MODELS[model], "bfloat16")
    run_ok("export", "./model", "--layout", layout, "--out", OUT)
    assert prep.verify(OUT, "./model")
    data = [key for key in store.objects if "/d/" in key or key.endswith(".distcp")]
    key = max(data, key=lambda key: len(store.objects[key]))
    flip_in_store(store, key, len(store.objects[key]) // 2)
    # A changed byte between two tensors is found when the checkpoint is opened.
    with suppress(DamagedError):
        assert not prep.verify(OUT)
