"""The processes of a job receive each byte of a remote model once, whatever the source and the mesh."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.algebra.grids import StoredRange
from prepcli.core.errors import DamagedError
from prepcli.formats.orbax import read_item
from prepcli.formats.safetensors import read_safetensors_folder
from prepcli.stores.paths import local_copy
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import serve_objects
from tests.helpers.processes import finish, start_processes
from tests.helpers.range_server import SentRange
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors, write_checkpoint

ByteRanges = dict[str, list[tuple[int, int]]]  # by file name
MESHES = ("8,1,1", "1,8,1", "1,2,4")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model `m`, its init `init`, and a model `tied` whose file has a copy of the embedding as the head."""
    folder = tmp_path_factory.mktemp("home")
    config = LLAMA | {"vocab_size": 1000, "hidden_size": 64, "torch_dtype": "bfloat16"}
    tensors = checkpoint_tensors(config, "bfloat16", tied=False, legacy=False)
    write_checkpoint(folder / "m", config, tensors, 2)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_checkpoint(folder / "tied", config | {"tie_word_embeddings": True}, tensors | head, 1)
    with chdir(folder):
        run_ok("save-init", "./m", "--pad-vocab", "8", "--out", "init")
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def safetensors_ranges(folder: Path) -> ByteRanges:
    """Return the byte ranges of the tensors of a Hugging Face folder."""
    headers = read_safetensors_folder(folder).headers
    return {
        header.file_name: [
            (tensor.offset, tensor.offset + tensor.nbytes) for tensor in header.tensors
        ]
        for header in headers
    }


def item_ranges(folder: Path) -> ByteRanges:
    """Return the byte ranges of the chunks of an Orbax item."""
    item, ranges = read_item(folder), ByteRanges()
    for array in item.arrays:
        for _, stored in array.stored_chunks():
            assert isinstance(stored, StoredRange)
            name = local_copy(item.files[stored.file]).relative_to(folder).as_posix()
            ranges.setdefault(name, []).append((stored.offset, stored.offset + stored.nbytes))
    return ranges


def receipt_counts(sent: Sequence[SentRange], ranges: ByteRanges, prefix: str) -> np.ndarray:
    """Return how often each byte of the tensors was sent, in requests that do not begin with the header of a file."""
    counts: list[np.ndarray] = []
    for name, spans in ranges.items():
        file_counts = np.zeros(max(stop for _, stop in spans), int)
        for item in sent:
            if item.name == prefix + name and item.start:
                file_counts[item.start : item.stop] += 1
        counts += [file_counts[slice(*span)] for span in spans]
    return np.concatenate(counts)


def check_all_once(sent: Sequence[SentRange], ranges: ByteRanges, prefix: str) -> None:
    counts = receipt_counts(sent, ranges, prefix)
    assert counts.size > 100_000
    assert (counts.min(), counts.mean(), counts.max()) == (1, 1, 1), prefix


@pytest.mark.parametrize(
    "meshes", slow_except([(MESHES,), (MESHES[-1:],)], [(MESHES[-1:],)]), ids=" ".join
)
def test_processes_receive_each_byte_once(home: Path, tmp_path: Path, meshes: tuple[str, ...]):
    sources = {"m": safetensors_ranges(home / "m"), "tied": safetensors_ranges(home / "tied")}
    sources["init"] = item_ranges(home / "init")
    contents = {source: read_files(home / source) for source in sources}
    objects = {
        f"bucket/{mesh}/{source}/{name}": content
        for mesh in meshes
        for source, files in contents.items()
        for name, content in files.items()
    }
    loads = [
        (f"gs://bucket/{mesh}/{source}", mesh, str(home / source))
        for source in sources
        for mesh in meshes
    ]
    loads.append(("o/m", "1,2,4", str(home / "m")))
    with serve_objects(objects) as store, serve_hub({"o/m": FakeRepo(contents["m"])}) as hub:
        run_processes(loads, env=store.environment() | hub.environment(tmp_path))
        for source, ranges in sources.items():
            for mesh in meshes:
                check_all_once(store.sent, ranges, f"bucket/{mesh}/{source}/")
        check_all_once(hub.sent, sources["m"], "")


def test_damaged_init_in_a_bucket_is_named_by_its_url(home: Path, monkeypatch: pytest.MonkeyPatch):
    objects = {
        f"bucket/init/{name}": content for name, content in read_files(home / "init").items()
    }
    name, spans = next(iter(item_ranges(home / "init").items()))
    damaged = bytearray(objects[f"bucket/init/{name}"])
    damaged[spans[0][0]] ^= 1
    with serve_objects(objects | {f"bucket/init/{name}": bytes(damaged)}) as store:
        for variable, value in store.environment().items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(DamagedError, match=r"of gs://bucket/init is damaged"):
            prep.load_params("gs://bucket/init")


def run_processes(loads: Sequence[tuple[str, str, str]], env: dict[str, str]) -> None:
    words = json.dumps(loads)
    outputs = finish(
        start_processes(
            words, count=2, devices=4, module="tests.helpers.parameters_process", env=env
        )
    )
    assert [code for code, _, _ in outputs] == [0, 0], [stderr[-2000:] for *_, stderr in outputs]
