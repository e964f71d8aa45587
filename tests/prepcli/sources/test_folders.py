"""Tests of checkpoints in a bucket: every format, steps of runs, and fuzzed files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.hf_api import RepoSibling
from obstore.store import MemoryStore
from safetensors.numpy import save

from prepcli.core.errors import PrepError
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.ocdbt import ValueLocation, read_ocdbt_index
from prepcli.formats.orbax import find_item
from prepcli.formats.registry import Kind
from prepcli.inspection.contents import read_contents
from prepcli.sources.detect import detect
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.open_folder import Access, OpenFolder
from prepcli.sources.opening import open_source
from prepcli.sources.remote_folders import HubFolder
from prepcli.stores import byte_ranges
from prepcli.stores.addresses import ObjectStoreUrl
from prepcli.stores.byte_ranges import DEFAULT_RETRY_POLICY
from prepcli.stores.hub import HubListing
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import StoreListing
from tests.helpers.orbax_items import write_ocdbt_index
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint, read_tensors


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("m")
    make_checkpoint(home / "m")
    return home / "m"


@pytest.fixture(scope="module")
def item(folder: Path) -> Path:
    """Return an init checkpoint of the model."""
    from prepcli.commands.cli.main import main

    out = folder.parent / "init"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "sys.argv",
            ["prep", "save-init", str(folder), "--out", str(out), "--mesh", "1,2,1", "-q"],
        )
        assert main() == 0
    return out


def memory_bucket(files: dict[str, bytes]) -> Bucket:
    store = MemoryStore()
    for name, data in files.items():
        store.put(f"at/{name}", data)
    return Bucket(ObjectStoreUrl("gs", "bucket", "at"), connections={(0, False): store})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def open_remote_checkpoint(files: dict[str, bytes]) -> dict[str, tuple[int, ...]]:
    """Do everything with a remote checkpoint that precedes reads of its tensors. Return their shapes."""
    bucket = memory_bucket(files)
    folder = OpenFolder(
        "gs://bucket/at", StoreListing(bucket.name, bucket, bucket.list_files()).root
    )
    kind = detect(folder).kind
    checkpoint_files = folder.fetch(kind)
    manifest = read_manifest(find_manifest_folder(checkpoint_files.path))
    located = LocatedCheckpoint(
        "gs://bucket/at",
        "m",
        kind,
        checkpoint_files,
        manifest,
        item=find_item(checkpoint_files.path),
    )
    source = open_source(located)
    read_contents(located)
    return {tensor.name: tuple(tensor.shape) for tensor in source.tensors}


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("name", ["config.json", "quantize_config.json"])
def test_bucket_tensors_decide_about_quantisation_settings(
    folder: Path, name: str, *, is_dense: bool
):
    files = contents(folder)
    settings = {"quant_method": "gptq", "bits": 4}
    if name == "config.json":
        settings = {**json.loads(files[name]), "quantization_config": settings}
    files[name] = json.dumps(settings).encode()
    if is_dense:
        assert len(open_remote_checkpoint(files)) == len(read_tensors(folder))
        return
    files = {key: data for key, data in files.items() if "safetensors" not in key}
    files["model.safetensors"] = save({"a.qweight": np.arange(3000, dtype=np.int32)})
    with pytest.raises(PrepError, match="gs://bucket/at is quantised"):
        open_remote_checkpoint(files)


def test_bucket_opens_both_kinds(folder: Path, item: Path):
    tensors = read_tensors(folder).items()
    shapes = {name.removeprefix("transformer."): array.shape for name, array in tensors}
    assert open_remote_checkpoint(contents(folder)) == shapes
    assert open_remote_checkpoint(contents(item)) == shapes


def manifest_without_records(item: Path) -> bytes:
    """Return the manifest of an init, without digests of files, for the same files under other names."""
    manifest = json.loads((item / "prep-manifest.json").read_bytes())
    return json.dumps(
        {key: value for key, value in manifest.items() if key not in ("files", "digest")}
    ).encode()


def test_bucket_opens_the_last_step_of_a_run(item: Path):
    files = {
        f"100/state/{name}": data
        for name, data in contents(item).items()
        if name != "prep-manifest.json"
    }
    files["100/prep-manifest.json"] = manifest_without_records(item)
    # An earlier step without a readable file: it must not be the one that is opened.
    files |= {name.replace("100/", "50/", 1): b"" for name in files}
    assert open_remote_checkpoint(files) == open_remote_checkpoint(contents(item))


def test_bucket_opens_values_outside_of_the_index(tmp_path: Path, item: Path):
    """Orbax can store values in another folder than the index."""
    files, index = {}, {}
    for key, value in read_ocdbt_index(item):
        if isinstance(value, ValueLocation):
            path = f"ocdbt.process_0/ocdbt_data/{value.path.removeprefix('d/')}"
            files[path], value = (
                (item / value.path).read_bytes(),
                ValueLocation(path, value.offset, value.nbytes),
            )
        index[key] = value
    write_ocdbt_index(tmp_path, sorted(index.items()), 0)
    other_files = {path: data for path, data in contents(item).items() if not path.startswith("d/")}
    manifest = {"prep-manifest.json": manifest_without_records(item)}
    open_remote_checkpoint(other_files | files | contents(tmp_path) | manifest)


def test_errors_of_a_bucket_name_no_download_into_it(folder: Path):
    files = contents(folder)
    shard = max(name for name in files if name.endswith(".safetensors"))
    missing = {name: data for name, data in files.items() if name != shard}
    for damaged in (missing, {**files, shard: files[shard][:-8]}):
        with pytest.raises(PrepError) as caught:
            open_remote_checkpoint(damaged)
        assert shard in f"{caught.value.what} {caught.value.why}"
        assert caught.value.hint
        assert "hf download" not in caught.value.hint


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "flax_model.msgpack", "model.gguf", "_METADATA", "notes.txt"]
)
def test_bucket_rejects_files_of_no_format(folder: Path, name: str):
    with pytest.raises(PrepError):
        open_remote_checkpoint(
            {"config.json": (folder / "config.json").read_bytes(), name: b"x" * 100}
        )


def damage_files(files: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """Return a copy of the files with up to three faults: flipped, cut, spliced, swapped, lengthened or missing."""
    damaged = dict(files)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(damaged))
        data = bytearray(damaged[name])
        position = rng.randrange(len(data) + 1)
        kind = rng.choice(("flip", "cut", "splice", "grow", "swap", "missing", "count", "noise"))
        if kind == "flip" and data:
            data[position % len(data)] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[position:]
        elif kind == "splice":
            data[position:position] = data[: rng.randrange(len(data) + 1)]
        elif kind == "grow":
            data += rng.randbytes(rng.randrange(100))
        elif kind == "swap":
            data = bytearray(damaged[rng.choice(sorted(damaged))])
        elif kind == "count":
            data[position : position + 8] = b"\xff" * 8
        elif kind == "noise":
            data = bytearray(rng.randbytes(rng.randrange(300)))
        damaged[name] = bytes(data)
        if kind == "missing" and len(damaged) > 1:
            del damaged[name]
    return damaged


def count_rejected(files: dict[str, bytes], count: int, seed: int) -> int:
    """Open `count` damaged checkpoints and return how many raised a PrepError. Other errors propagate."""
    rng, rejected = random.Random(seed), 0
    for _ in range(count):
        try:
            open_remote_checkpoint(damage_files(files, rng))
        except PrepError:
            rejected += 1
    return rejected


@pytest.mark.parametrize("seed", slow_except(range(12), (0,)))
def test_fuzzed_checkpoint_opens_or_raises_prep_error(folder: Path, item: Path, seed: int):
    assert count_rejected(contents(folder), 75, seed) > 25
    assert count_rejected(contents(item), 50, seed) > 12


@pytest.mark.parametrize(
    ("kind", "weights", "commit", "why"),
    [
        ("safetensors", "model.safetensors", None, "the hub did not report a commit"),
        ("torch", "pytorch_model.bin", "abc123", "the hub lists no size of pytorch_model.bin"),
    ],
)
def test_stream_error_names_missing_commit_or_size(
    kind: Kind, weights: str, commit: str | None, why: str
):
    files = {weights: RepoSibling(weights)}
    listing = HubListing("owner/name", None, commit, files, DEFAULT_RETRY_POLICY)
    with pytest.raises(PrepError, match="cannot stream owner/name") as caught:
        HubFolder(listing, Access(stream=True)).fetch(kind)
    assert caught.value.why == why
