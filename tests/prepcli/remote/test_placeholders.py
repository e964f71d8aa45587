"""What stands for remote files: sizes, headers, small files, and nothing that leads elsewhere; whatever is served."""

from __future__ import annotations

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

from prepcli.engine.files import ByteArray
from prepcli.errors import PrepError
from prepcli.formats.ocdbt import FileRange, write_ocdbt_index
from prepcli.formats.ocdbt_read import read_ocdbt_index
from prepcli.formats.safetensors import read_safetensors_header
from prepcli.inspection.contents import read_contents
from prepcli.remote import remote_files
from prepcli.remote.object_store import Bucket, ObjectStoreUrl
from prepcli.remote.placeholders import (
    create_placeholder_folder,
    placeholder_path,
    read_all,
    rename_in_errors,
    write_header,
    write_small_file,
    write_sparse_file,
)
from prepcli.remote.remote_files import RemoteFile
from prepcli.remote.retries import DEFAULT_RETRY_POLICY
from prepcli.sources import bucket_folders
from prepcli.sources.bucket_folders import open_bucket
from prepcli.sources.locate import LocatedCheckpoint, _kind_of
from prepcli.sources.opening import open_located
from tests.helpers.tiny_checkpoints import make_checkpoint


class Served:
    """Content in memory, as Ranges."""

    name = "o/model"
    retry_policy = DEFAULT_RETRY_POLICY

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, 0

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        into[:] = np.frombuffer(self.content, np.uint8)[offset : offset + into.size]
        self.asked += into.size
        return into.size


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("m")
    make_checkpoint(home / "m")
    return home / "m"


@pytest.fixture(scope="module")
def item(folder: Path) -> Path:
    """An init checkpoint of the model."""
    from prepcli.cli.main import main

    out = folder.parent / "init"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["prep", "save-init", str(folder), "--out", str(out), "--mesh", "1,2,1", "-q"])
        assert main() == 0
    return out


def bucket_of(files: dict[str, bytes]) -> Bucket:
    store = MemoryStore()
    for name, data in files.items():
        store.put(f"at/{name}", data)
    return Bucket(ObjectStoreUrl("gs", "bucket", "at"), connection=store)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def opened(files: dict[str, bytes]) -> None:
    """Everything that is done with a remote checkpoint before its tensors are read."""
    found = open_bucket(bucket_of(files))
    try:
        located = LocatedCheckpoint("m", found.placeholder_folder, _kind_of(found, "gs://bucket/at"), remote=found)
        open_located(located, "gs://bucket/at")
        read_contents(located, "gs://bucket/at")
    finally:
        shutil.rmtree(found.placeholder_folder)


@pytest.mark.parametrize("padding", [0, 100, 200_000])
def test_of_a_safetensors_file_only_the_header_comes(tmp_path: Path, folder: Path, padding: int):
    real = sorted(folder.glob("*.safetensors"))[0]
    content = real.read_bytes()
    nbytes = int.from_bytes(content[:8], "little")
    content = (
        (nbytes + padding).to_bytes(8, "little") + content[8 : 8 + nbytes] + b" " * padding + content[8 + nbytes :]
    )
    served, file = Served(content + b""), RemoteFile(real.name, len(content), "")
    write_header(tmp_path, served, file)
    header = read_safetensors_header(tmp_path / real.name, 0)
    assert header.size == len(content)
    assert len(header.tensors) > 3
    assert served.asked <= max(64 << 10, nbytes + padding + 8)


def test_small_files_are_whole_and_their_time_is_that_of_their_content(tmp_path: Path):
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        write_small_file(tmp_path, RemoteFile(name, 1, ""), content)
    times = [(tmp_path / name).stat().st_mtime_ns for name in "abc"]
    assert times[0] == times[1] != times[2]
    assert (tmp_path / "c").read_bytes() == b"y"


def test_what_is_not_small_is_not_brought_whole():
    with pytest.raises(PrepError, match="is too large"):
        read_all(Served(b""), RemoteFile("tokenizer.json", 1 << 40, ""))


@given(st.text(max_size=40))
def test_no_name_leads_out_of_the_folder(name: str):
    mirror = Path("/mirror")
    try:
        path = placeholder_path(mirror, RemoteFile(name, 0, ""))
    except PrepError:
        return
    except UnicodeEncodeError:
        pytest.fail("half of a surrogate pair")
    assert path.is_relative_to(mirror)
    assert path != mirror
    assert ".." not in path.parts


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "x" * 300, "a/" * 600 + "b", "\ud800"]
)
def test_names_that_are_none(name: str):
    with pytest.raises(PrepError, match="no name for a file"):
        placeholder_path(Path("/mirror"), RemoteFile(name, 0, ""))


def test_a_name_that_is_a_file_and_a_folder(tmp_path: Path):
    write_small_file(tmp_path, RemoteFile("d", 1, ""), b"x")
    with pytest.raises(PrepError, match="stand-in of d/x"):
        write_sparse_file(tmp_path, Served(b""), RemoteFile("d/x", 0, ""))


def test_errors_speak_of_the_checkpoint():
    mirror = create_placeholder_folder()
    with pytest.raises(PrepError) as caught, rename_in_errors(mirror, "gs://b/m"):
        raise PrepError(f"{mirror}/x is broken", f"in {mirror}", f"`hf download o/m --local-dir {mirror}`")
    assert (caught.value.what, caught.value.why, caught.value.hint) == ("gs://b/m/x is broken", "in gs://b/m", "")
    mirror.rmdir()


def test_both_kinds_are_opened(folder: Path, item: Path):
    opened(contents(folder))
    opened(contents(item))


def test_a_run_is_opened_at_its_last_step(item: Path):
    files = {f"100/state/{name}": data for name, data in contents(item).items() if name != "prep-manifest.json"}
    files["100/prep-manifest.json"] = contents(item)["prep-manifest.json"]
    opened(files)


def test_values_that_lie_apart_from_the_index_stay_where_they_are(tmp_path: Path, item: Path, monkeypatch):
    """Orbax keeps the two in folders of their own where it is asked to."""
    files, places = {}, {}
    for key, value in read_ocdbt_index(item):
        if isinstance(value, FileRange):
            path = f"ocdbt.process_0/ocdbt_data/{value.path.removeprefix('d/')}"
            files[path], value = (item / value.path).read_bytes(), FileRange(path, value.offset, value.nbytes)
        places[key] = value
    write_ocdbt_index(tmp_path, sorted(places.items()), 0)
    others = {path: data for path, data in contents(item).items() if not path.startswith("d/")}
    monkeypatch.setattr(bucket_folders, "SMALL_NBYTES", 40_000)
    assert max(map(len, files.values())) > 40_000
    opened(others | files | contents(tmp_path))


def test_without_an_index_nothing_is_brought(item: Path, monkeypatch: pytest.MonkeyPatch):
    """What has a file for each chunk would come here whole before it is refused."""
    monkeypatch.setattr(bucket_folders, "write_small_file", lambda *_: pytest.fail("a file was brought"))
    files = {name: data for name, data in contents(item).items() if name != "manifest.ocdbt"}
    with pytest.raises(PrepError, match="has no OCDBT index"):
        opened(files)


def killed_with_a_mirror(environment: dict[str, str]) -> Path:
    program = "import os; from prepcli.sources import mirrors as m; print(m.new_mirror(), flush=True); os.abort()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    return Path(done.stdout.strip())


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = killed_with_a_mirror(os.environ | {"TMPDIR": str(tmp_path)})
    assert left.parent == tmp_path
    (left / "config.json").write_text("{}")
    (tmp_path / "kept").mkdir()
    (tmp_path / "prep-remote-link").symlink_to(tmp_path / "kept")
    alive = create_placeholder_folder()
    assert left.exists()  # whoever made it a moment ago may not have got to hold it
    for folder in (left, alive, tmp_path / "kept"):
        os.utime(folder, (0, 0))
    another = create_placeholder_folder()
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, another.name, "kept", "prep-remote-link"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "flax_model.msgpack", "model.gguf", "_METADATA", "notes.txt"])
def test_what_is_not_read_from_afar_is_refused(folder: Path, name: str):
    with pytest.raises(PrepError):
        opened({"config.json": (folder / "config.json").read_bytes(), name: b"x" * 100})


def spoiled(files: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """Files with a few things wrong: flipped, cut, spliced, swapped, lengthened or gone."""
    found = dict(files)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(found))
        data = bytearray(found[name])
        at = rng.randrange(len(data) + 1)
        kind = rng.choice(("flip", "cut", "splice", "grow", "swap", "gone", "count", "noise"))
        if kind == "flip" and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "splice":
            data[at:at] = data[: rng.randrange(len(data) + 1)]
        elif kind == "grow":
            data += rng.randbytes(rng.randrange(100))
        elif kind == "swap":
            data = bytearray(found[rng.choice(sorted(found))])
        elif kind == "count":
            data[at : at + 8] = b"\xff" * 8
        elif kind == "noise":
            data = bytearray(rng.randbytes(rng.randrange(300)))
        found[name] = bytes(data)
        if kind == "gone" and len(found) > 1:
            del found[name]
    return found


def fuzz(files: dict[str, bytes], count: int, seed: int) -> int:
    """How many of so many spoiled checkpoints were refused; any other error than PrepError is raised."""
    rng, refused = random.Random(seed), 0
    for _ in range(count):
        try:
            opened(spoiled(files, rng))
        except PrepError:
            refused += 1
    return refused


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_served_is_opened_or_refused(folder: Path, item: Path, seed: int):
    assert fuzz(contents(folder), 300, seed) > 100
    assert fuzz(contents(item), 200, seed) > 50
