"""Places of tensors in files, as a listing shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.formats.orbax import find_item
from prepcli.inspection.contents import MAX_PATH_PARTS, name_path, read_contents
from prepcli.planning.arrays import whole_array
from prepcli.sources.locate import OpenFolder, locate
from prepcli.sources.source import stored_tensor
from prepcli.stores.paths import local_copy
from tests.helpers.golden_flax import FOLDER, decode_msgpack
from tests.helpers.memory_stores import store_of
from tests.helpers.orbax_items import read_files

PIECES = FOLDER / "llama/pieces.msgpack"


def test_first_place_of_an_array_in_pieces_is_in_its_file():
    contents = read_contents(locate(str(PIECES)))
    data = PIECES.read_bytes()
    arrays = {".".join(path): value for path, value in decode_msgpack(data, "flax").items()}
    assert len(contents.entries) > 5
    for entry in contents.entries:
        place = contents.first_place(entry)
        assert place is not None
        name, offset = place
        assert name == PIECES.name
        first = arrays[entry.name].reshape(-1)[:1].tobytes()
        assert data[offset : offset + len(first)] == first


def test_first_place_of_every_tensor_is_its_first_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    values = {"a": rng.random((3, 4), np.float32), "b.c": rng.random(5)}
    Path("m").mkdir()
    save_file(values, "m/model.safetensors")
    prep.save_init("m", "item", verbatim=True)
    for folder in ("m", "item"):
        contents = read_contents(locate(folder))
        found = 0
        for entry in contents.entries:
            place = contents.first_place(entry)
            assert place is not None
            data = local_copy(contents.folder / place[0]).read_bytes()
            key = entry.name.removeprefix("params.")
            if key in values:
                first = values[key].reshape(-1)[:1].tobytes()
                assert data[place[1] : place[1] + len(first)] == first
                found += 1
        assert found == len(values)


def test_first_places_in_a_store_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    save_file({"a": np.ones((3, 4), np.float32), "b.c": np.ones(5)}, "m/model.safetensors")
    prep.save_init("m", "item", verbatim=True)
    for folder in ("m", "item"):
        located = locate(folder)
        local = read_contents(located)
        root, _ = store_of(read_files(Path(folder)))
        stored = read_contents(
            replace(located, files=OpenFolder(folder, root), item=find_item(root))
        )
        places = [stored.first_place(entry) for entry in stored.entries]
        assert places == [local.first_place(entry) for entry in local.entries]


def test_name_path_splits_names_of_many_dots():
    path = name_path(stored_tensor(whole_array("a." * 100 + "b", "int8", (), (0, 0))))
    assert len(path) == MAX_PATH_PARTS
    assert ".".join(path) == "a." * 100 + "b"
