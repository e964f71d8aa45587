"""Measure the memory and time of `prep merge`, and compare all merged values with NumPy.

    python -m bench.merge --work FOLDER [--model gpt-neo-1.3B] [--layers 8] [--memory 64MiB,512MiB]

The base has random values in bfloat16, and the adapter a pair of random matrices for every matrix of a layer. The peak
is that of `prep merge` minus that of `prep inspect` of the base: the quantity that `--memory` limits. FOLDER keeps the
base and the adapter for the next run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from bench.evidence import log
from bench.meter import CommandCost, measure
from bench.models import tensor_entries, write_model
from bench.published import PUBLISHED, override_config
from prepcli.core.tables import format_table

BASE, ADAPTER, MERGED = "base", "adapter", "merged"
RANK, ALPHA, STD = 16, 32.0, 0.02
MIB = 1 << 20
HALF_ULP = 2.0**-8  # largest relative error of rounding to bfloat16
FLOAT32_ERROR = 1e-8  # error of a float32 sum of `RANK` products and a value of the base


@dataclass(slots=True)
class Comparison:
    """Counts of merged values, and of tensors without an adapter, which keep their bytes."""

    n_values: int = 0
    n_changed: int = 0
    n_other_rounding: int = 0
    n_equal_tensors: int = 0

    def add(self, base: np.ndarray, merged: np.ndarray, *, exact: np.ndarray) -> None:
        """Count the values of a tensor. Raise SystemExit if one is not the exact value, rounded."""
        error = np.abs(merged.astype(np.float64) - exact)
        if (error > HALF_ULP * np.abs(exact) + FLOAT32_ERROR).any():
            raise SystemExit(f"a merged value is wrong by {error.max()}")
        rounded = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
        self.n_values += base.size
        self.n_changed += int(np.count_nonzero(merged != base))
        self.n_other_rounding += int(np.count_nonzero(merged != rounded))


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write an adapter for modules with these weights in the format of PEFT."""
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for module, (num_outputs, num_inputs) in shapes.items():
        for name, shape in (("lora_A", (RANK, num_inputs)), ("lora_B", (num_outputs, RANK))):
            tensors[f"base_model.model.{module}.{name}.weight"] = STD * rng.standard_normal(
                shape, np.float32
            )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def run_prep(work: Path, *words: str | Path) -> CommandCost:
    """Run a prep command on paths of the working folder. Raise SystemExit if it fails."""
    cost = measure([sys.executable, "-m", "prepcli", *words, "--quiet"])
    if cost.exit_code:
        raise SystemExit(f"prep {words[0]}: {cost.stderr}")
    return cost


def open_tensors(folder: Path) -> dict[str, Callable[[], np.ndarray]]:
    """Return a function for each tensor of a folder's weight files that reads it."""
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, "np")
        readers |= {name: partial(file.get_tensor, name) for name in list(file.keys())}
    return readers


def compare(work: Path) -> Comparison:
    """Compare the merged model with base + alpha / rank B A in float64. Raise SystemExit for an unexplained value."""
    result = Comparison()
    bases, adapters, merged_tensors = (
        open_tensors(work / name) for name in (BASE, ADAPTER, MERGED)
    )
    for name, read_base in bases.items():
        base, merged = read_base(), merged_tensors[name]()
        matrices = [
            f"base_model.model.{name.removesuffix('.weight')}.lora_{matrix}.weight"
            for matrix in "BA"
        ]
        if matrices[0] in adapters:
            b, a = (adapters[matrix]().astype(np.float64) for matrix in matrices)
            result.add(base, merged, exact=base.astype(np.float64) + ALPHA / RANK * (b @ a))
        elif base.tobytes() == merged.tobytes():
            result.n_equal_tensors += 1
        else:
            raise SystemExit(f"{name} has changed")
    return result


def main() -> None:
    """Print the table and the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", choices=PUBLISHED, default="gpt-neo-1.3B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--memory", default="64MiB,128MiB,512MiB")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    config = override_config(PUBLISHED[options.model], "bfloat16", options.layers, {})
    if not (work / BASE).exists():
        write_model(work / BASE, config)
    if not (work / ADAPTER).exists():
        shapes = {entry[0]: entry[2] for entry in tensor_entries(config) if len(entry[2]) == 2}
        write_adapter(
            work / ADAPTER,
            {n.removesuffix(".weight"): s for n, s in shapes.items() if "embed" not in n},
        )
    inspect_nbytes = run_prep(work, "inspect", work / BASE).peak_nbytes
    rows: list[Sequence[str]] = []
    for memory in options.memory.split(","):
        shutil.rmtree(work / MERGED, ignore_errors=True)
        command = ("merge", work / ADAPTER, work / BASE, "--out", work / MERGED, "--memory", memory)
        cost = run_prep(work, *command)
        log(f"--memory {memory}: {cost.wall_s:.1f} s")
        peak_mib = (cost.peak_nbytes - inspect_nbytes) / MIB
        rows.append((memory, f"{peak_mib:.0f}", f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}"))
    header = ("--memory", "peak MiB", "seconds", "CPU s")
    print(format_table(rows, header, right_aligned=header[1:]))
    result = compare(work)
    print(
        f"{result.n_values:,} values with an adapter: {result.n_changed:,} changed, {result.n_other_rounding:,} rounded"
        f" otherwise than the exact value; {result.n_equal_tensors} other tensors have equal bytes"
    )


if __name__ == "__main__":
    main()
