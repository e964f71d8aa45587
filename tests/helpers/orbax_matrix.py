"""Storage forms of Orbax items, and what each command makes of them.

`tests.helpers.orbax_item_forms` writes the items with Orbax and TensorStore. prep inspects names, shapes and dtypes of
each item, verifies its values against a safetensors file of the expected bits, reshards it to an item that Orbax
restores, and loads its arrays. A form is `equal` if every command finds the expected bits. It is `refused` if every
command ends with an error. Needs the `parity` extra.
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
import safetensors.numpy

import prepcli as prep
from prepcli.core.errors import PrepError

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
