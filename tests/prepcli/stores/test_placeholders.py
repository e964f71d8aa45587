"""Tests of placeholder files: sizes, headers, small files, safe paths, and fuzzed remote checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore
from safetensors.numpy import save

from prepcli.core.errors import PrepError
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.ocdbt import ValueLocation, read_ocdbt_index
from prepcli.formats.safetensors import read_safetensors_header
from prepcli.inspection.contents import read_contents
from prepcli.sources import bucket_folders
from prepcli.sources.bucket_folders import BucketFolder
from prepcli.sources.detect import detect
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.opening import open_source
from prepcli.stores import byte_ranges as remote_files
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket, ObjectStoreUrl
from prepcli.stores.placeholders import (
    create_placeholder_folder,
    placeholder_path,
    read_all,
    rename_in_errors,
    write_header,
    write_small_file,
    write_sparse_file,
)
from prepcli.stores.retries import DEFAULT_RETRY_POLICY
from tests.helpers.orbax_items import write_ocdbt_index
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint, read_tensors


class MemoryReader:
    """Range reader of bytes in memory."""

    name = "o/model"
    retry_policy = DEFAULT_RETRY_POLICY

    def __init__(self, content: bytes) -> None:
        self.content, self.nbytes_read = content, 0

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        into[:] = np.frombuffer(self.content, np.uint8)[offset : offset + into.size]
        self.nbytes_read += into.size
        return into.size


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.0)


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
    return Bucket(ObjectStoreUrl("gs", "bucket", "at"), connection=store)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def open_remote_checkpoint(files: dict[str, bytes]) -> dict[str, tuple[int, ...]]:
    """Do everything with a remote checkpoint that precedes reads of its tensors. Return their shapes."""
    folder = BucketFolder("gs://bucket/at", memory_bucket(files))
    kind = detect(folder)
    local_files = folder.prepare_local_files(kind)
    try:
        manifest = read_manifest(find_manifest_folder(local_files.path))
        located = LocatedCheckpoint("gs://bucket/at", "m", kind, local_files, manifest)
        source = open_source(located)
        read_contents(located)
        return {tensor.name: tuple(tensor.shape) for tensor in source.tensors}
    finally:
        shutil.rmtree(local_files.path)


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


@pytest.mark.parametrize("padding", [0, 100, 200_000])
def test_write_header_fetches_only_the_header(tmp_path: Path, folder: Path, padding: int):
    real = sorted(folder.glob("*.safetensors"))[0]
    content = real.read_bytes()
    nbytes = int.from_bytes(content[:8], "little")
    content = (
        (nbytes + padding).to_bytes(8, "little")
        + content[8 : 8 + nbytes]
        + b" " * padding
        + content[8 + nbytes :]
    )
    reader, file = MemoryReader(content + b""), RemoteFile(real.name, len(content), "")
    write_header(tmp_path, reader, file)
    header = read_safetensors_header(tmp_path / real.name, 0)
    assert header.size == len(content)
    assert len(header.tensors) > 3
    assert reader.nbytes_read <= max(64 << 10, nbytes + padding + 8)


def test_write_small_file_derives_the_time_from_content(tmp_path: Path):
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        write_small_file(tmp_path, RemoteFile(name, 1, ""), content)
    times = [(tmp_path / name).stat().st_mtime_ns for name in "abc"]
    assert times[0] == times[1] != times[2]
    assert (tmp_path / "c").read_bytes() == b"y"


def test_read_all_rejects_large_files():
    with pytest.raises(PrepError, match="is too large"):
        read_all(MemoryReader(b""), RemoteFile("tokenizer.json", 1 << 40, ""))


@given(st.text(max_size=40))
def test_placeholder_path_stays_in_the_folder(name: str):
    placeholder_folder = Path("/folder")
    try:
        path = placeholder_path(placeholder_folder, RemoteFile(name, 0, ""))
    except PrepError:
        return
    except UnicodeEncodeError:
        pytest.fail("half of a surrogate pair")
    assert path.is_relative_to(placeholder_folder)
    assert path != placeholder_folder
    assert ".." not in path.parts


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "x" * 300, "a/" * 600 + "b", "\ud800"]
)
def test_placeholder_path_rejects_invalid_names(name: str):
    with pytest.raises(
        PrepError, match=r"invalid file name|it is not (a file name|inside /folder)"
    ):
        placeholder_path(Path("/folder"), RemoteFile(name, 0, ""))


def test_write_sparse_file_rejects_a_file_as_folder(tmp_path: Path):
    write_small_file(tmp_path, RemoteFile("d", 1, ""), b"x")
    with pytest.raises(PrepError, match="placeholder of d/x"):
        write_sparse_file(tmp_path, MemoryReader(b""), RemoteFile("d/x", 0, ""))


def test_rename_in_errors_names_the_checkpoint():
    placeholder_folder = create_placeholder_folder()
    with pytest.raises(PrepError) as caught, rename_in_errors(placeholder_folder, "gs://b/m"):
        raise PrepError(
            f"{placeholder_folder}/x is broken",
            f"in {placeholder_folder}",
            f"`hf download o/m --local-dir {placeholder_folder}`",
        )
    assert (caught.value.what, caught.value.why, caught.value.hint) == (
        "gs://b/m/x is broken",
        "in gs://b/m",
        "",
    )
    placeholder_folder.rmdir()


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


def test_bucket_leaves_values_outside_the_index_remote(tmp_path: Path, item: Path, monkeypatch):
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
    monkeypatch.setattr(bucket_folders, "SMALL_NBYTES", 40_000)
    assert max(map(len, files.values())) > 40_000
    manifest = {"prep-manifest.json": manifest_without_records(item)}
    open_remote_checkpoint(other_files | files | contents(tmp_path) | manifest)


def test_bucket_fetches_nothing_without_an_index(item: Path, monkeypatch: pytest.MonkeyPatch):
    """An unfinished checkpoint must not be fetched completely before it is rejected."""
    monkeypatch.setattr(
        bucket_folders, "write_small_file", lambda *_: pytest.fail("a file was fetched")
    )
    files = {name: data for name, data in contents(item).items() if name != "manifest.ocdbt"}
    with pytest.raises(PrepError, match="neither an OCDBT index"):
        open_remote_checkpoint(files)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "flax_model.msgpack", "model.gguf", "__0_0.distcp"]
)
def test_bucket_is_rejected_before_any_header_is_fetched(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        bucket_folders, "create_placeholder_folder", lambda: pytest.fail("placeholders were made")
    )
    with pytest.raises(PrepError, match=r"gs://bucket/at (is|cannot be read remotely)"):
        open_remote_checkpoint({name: b"x", "tokenizer.json": b"{}"})


def folder_of_killed_process(environment: dict[str, str]) -> Path:
    program = (
        "import os; from prepcli.stores.placeholders import create_placeholder_folder;"
        " print(create_placeholder_folder(), flush=True); os.abort()"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == -signal.SIGABRT
    return Path(process.stdout.strip())


def test_placeholder_folder_of_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = folder_of_killed_process(os.environ | {"TMPDIR": str(tmp_path)})
    assert leftover.parent == tmp_path
    (leftover / "config.json").write_text("{}")
    (tmp_path / "kept").mkdir()
    (tmp_path / "prep-remote-link").symlink_to(tmp_path / "kept")
    alive = create_placeholder_folder()
    assert leftover.exists()  # a new folder may not be locked yet
    for folder in (leftover, alive, tmp_path / "kept"):
        os.utime(folder, (0, 0))
    another = create_placeholder_folder()
    assert {path.name for path in tmp_path.iterdir()} == {
        alive.name,
        another.name,
        "kept",
        "prep-remote-link",
    }


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "flax_model.msgpack", "model.gguf", "_METADATA", "notes.txt"]
)
def test_bucket_rejects_local_only_formats(folder: Path, name: str):
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
