"""Storage forms of Orbax items: each is read bit for bit, or refused with a reason.

`tests.helpers.orbax_item_forms` writes the items with Orbax and TensorStore. prep inspects names, shapes and dtypes of
each item, verifies its values against a safetensors file of the expected bits, reshards it to an item that Orbax
restores, and loads its arrays. A form is `equal` if every command finds the expected bits. It is `refused` if every
command ends with an error.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import prepcli as prep
from prepcli.algebra.boxes import full_box
from prepcli.core.errors import PrepError
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import OrbaxItem, find_item, read_item
from prepcli.restore.item_reader import ItemReader
from prepcli.stores.paths import local_copy
from tests.helpers.slow_cases import slow_except

pytest.importorskip("orbax.checkpoint")

EQUAL = "equal"
WRONG = "WRONG"
CRASH = "CRASH"
# Name of a leaf -> dtype, shape and bits in hexadecimal.
Leaves = Mapping[str, Sequence[Any]]
# Dtypes of safetensors files.
SAFETENSORS_DTYPES = {
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
}


@dataclass(frozen=True)
class FormResult:
    """Results of the commands for one form: `equal`, `WRONG`, `CRASH`, or the text of an error."""

    name: str
    commands: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """Return `equal`, `refused`, or the worst result."""
        results = set(self.commands.values())
        for bad in (CRASH, WRONG):
            if any(result.startswith(bad) for result in results):
                return bad
        if results == {EQUAL}:
            return EQUAL
        if EQUAL not in results:
            return "refused"
        return "partly refused"

    @property
    def reason(self) -> str:
        """Return the first result other than `equal`, with its command."""
        for command, result in self.commands.items():
            if result != EQUAL:
                return f"{command}: {result}"
        return ""


def inspected_leaves(item: Path, expected: Leaves) -> bool:
    """Return whether `inspect` names the expected leaves, with their shapes and dtypes."""
    shown: dict[str, tuple[str, list[int]]] = {}
    for tensor in prep.inspect(item).tensors:
        shown[tensor.name] = (tensor.dtype, list(tensor.shape))
    return shown == {name: (leaf[0], list(leaf[1])) for name, leaf in expected.items()}


def verified_values(item: Path, expected: Leaves, work: Path) -> bool:
    """Return whether `verify` finds the values of an item equal to a safetensors file."""
    folder = work / "expected"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors: dict[str, np.ndarray] = {}
    for name, (dtype, shape, bits) in expected.items():
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        tensors[name] = np.frombuffer(bytes.fromhex(bits), kind).reshape(shape)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "unknown"}')
    return bool(prep.verify(item, folder))


def resharded_values(item: Path, expected: Leaves, work: Path) -> bool:
    """Return whether Orbax restores the expected bits from an item that `reshard` wrote."""
    import orbax.checkpoint as ocp

    out = work / "resharded"
    shutil.rmtree(out, ignore_errors=True)
    prep.reshard(item, out, mesh="1,2,1", scan=False)
    restored = ocp.PyTreeCheckpointer().restore(out)["params"]
    return _described(restored) == _as_lists(expected)


def loaded_values(item: Path, expected: Leaves) -> bool:
    """Return whether `load_params` returns the expected bits."""
    params = prep.load_params(item, dtype="keep", verbatim=True)
    stacked = {name: leaf for name, leaf in params.items() if "*" in name}
    plain = {name: leaf for name, leaf in params.items() if name not in stacked}
    if not stacked:
        return _described(plain) == _as_lists(expected)
    # Leaves with numbered names are stacked: the number of values is compared.
    num_values = sum(int(np.prod(leaf[1])) for leaf in expected.values())
    return sum(np.asarray(leaf).size for leaf in params.values()) == num_values


def _described(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return dtype, shape and bits of each array."""
    described: dict[str, list[Any]] = {}
    for name, leaf in arrays.items():
        array = np.asarray(leaf)
        described[name] = [array.dtype.name, list(array.shape), array.tobytes().hex()]
    return described


def _as_lists(expected: Leaves) -> dict[str, list[Any]]:
    return {name: list(leaf) for name, leaf in expected.items()}


def check_form(name: str, item: Path, expected: Leaves, work: Path) -> FormResult:
    """Run all commands on an item."""
    commands: dict[str, Callable[[], bool]] = {
        "inspect": lambda: inspected_leaves(item, expected),
        "reshard": lambda: resharded_values(item, expected, work),
        "load_params": lambda: loaded_values(item, expected),
    }
    if {leaf[0] for leaf in expected.values()} <= SAFETENSORS_DTYPES:
        commands["verify"] = lambda: verified_values(item, expected, work)
    results: dict[str, str] = {}
    for command, check in commands.items():
        try:
            results[command] = EQUAL if check() else WRONG
        except PrepError as error:
            results[command] = f"{error.what}; {error.why}"
        except Exception as error:
            results[command] = f"{CRASH} {type(error).__name__}: {error}"
    return FormResult(name, results)


def run_matrix(work: Path, pattern: str) -> list[FormResult]:
    """Write the items that match a pattern to `work`, unless items exist there, and check them."""
    items = work / "items"
    if not (items / "expected.json").exists():
        shutil.rmtree(items, ignore_errors=True)
        command = [sys.executable, "-m", "tests.helpers.orbax_item_forms", str(items), pattern]
        subprocess.run(command, check=True, capture_output=True)
    expected = json.loads((items / "expected.json").read_text())
    results: list[FormResult] = []
    for name in fnmatch.filter(expected, pattern):
        results.append(check_form(name, items / name, expected[name], work))
    return results


REFUSED_FORMS = {
    *("zarr2-files-bz2", "zarr2-files-f-order", "zarr2-files-slash-keys", "zarr2-files-big-endian"),
    *("zarr2-files-blosc-lz4", "zarr2-files-blosc-lz4hc", "zarr2-files-blosc-zstd"),
    *("zarr2-files-blosc-blosclz", "zarr2-files-blosc-zlib", "zarr2-ocdbt-blosc-lz4"),
    *("zarr3-files-blosc", "zarr3-files-sharded-blosc", "zarr3-ocdbt-blosc"),
    *("zarr3-files-transpose", "zarr3-files-big-endian", "two-processes-not-merged"),
}


def check_results(results: list[FormResult]) -> None:
    for result in results:
        expected = "refused" if result.name in REFUSED_FORMS else EQUAL
        assert result.verdict == expected, (result.name, result.commands)
        if "blosc" in result.name:
            assert all("`blosc`" in reason for reason in result.commands.values())


@pytest.mark.parametrize(
    "pattern", slow_except(["two-processes-*", "zarr?-ocdbt-[gb]*"], ["zarr?-ocdbt-[gb]*"])
)
def test_item_of_each_storage_form_is_read_or_refused(tmp_path: Path, pattern: str):
    results = run_matrix(tmp_path, pattern)
    assert len(results) >= 2
    check_results(results)


# The test above shows both results by default.
@pytest.mark.slow
def test_all_forms_are_read_or_refused(tmp_path: Path):
    results = run_matrix(tmp_path, "*")
    assert len(results) > 100
    check_results(results)


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
