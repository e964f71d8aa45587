"""Tests of reading every storage form that Orbax writes, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prepcli.algebra.boxes import full_box
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import OrbaxItem, find_item, read_item
from prepcli.restore.item_reader import ItemReader
from prepcli.stores.paths import local_copy

SAVER = Path(__file__).parents[2] / "helpers" / "orbax_forms.py"
FORMS = [
    *(
        f"zarr{version}{store}{codec}{chunks}"
        for version in (2, 3)
        for store in ("", "-ocdbt")
        for codec in ("", "-zstd")
        for chunks in ("", "-many")
    ),
    *("v1", "run", "processes"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    run = subprocess.run(
        [sys.executable, SAVER, folder], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return folder


def item_of(folder: Path) -> OrbaxItem:
    item_folder = find_item(folder)
    assert item_folder is not None
    return read_item(item_folder)


@pytest.mark.parametrize("form", FORMS)
def test_read_item_supports_every_storage_form(saved: Path, form: str):
    item = item_of(saved / form)
    expected = json.loads((saved / "expected.json").read_text())
    named = (
        {name: leaf for name, leaf in expected.items() if leaf[1]}
        if form == "processes"
        else expected
    )
    assert {meta.name for meta in item.arrays} == named.keys()
    with ItemReader(item, NO_MANIFEST) as reader:
        for meta in item.arrays:
            array = np.full(meta.shape, 1, numpy_dtype(meta.dtype))
            reader.read(meta.name, {full_box(meta.shape): array})
            assert [meta.dtype, list(meta.shape), array.tobytes().hex()] == expected[meta.name]


def test_saved_items_have_their_storage_form(saved: Path):
    """Detect a change of Orbax's defaults, which would leave a form untested."""
    for form in (form for form in FORMS if form.startswith("zarr")):
        item = item_of(saved / form)
        assert {array.codecs for array in item.arrays} == {("zstd",) if "zstd" in form else ()}
        assert (saved / form / "manifest.ocdbt").exists() == ("ocdbt" in form)
        assert ("many" in form) == any(len([*array.stored_chunks()]) > 8 for array in item.arrays)
    folders = {
        local_copy(path).relative_to(saved / "processes").parts[0]
        for path in item_of(saved / "processes").files
    }
    assert folders == {"ocdbt.process_0", "ocdbt.process_1"}
    assert {array.codecs for array in item_of(saved / "processes").arrays} == {("gzip",)}
