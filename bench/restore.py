"""A checkpoint onto 8 CPU devices, checked and unchecked in turns: seconds, bytes read for each byte stored, memory.

    python -m bench.restore INIT --mesh 1,2,4 --pairs 5
    python -m bench.restore RUN --mesh 1,2,4 --pairs 5 --start

Without `--start` the parameters alone are restored; with it the whole state that `prep train` begins with: of an init
the parameters and a new optimizer state, of a run the last step. The files' pages are dropped from the page cache
before each restore (`posix_fadvise`); reads are those that the kernel counts as asked for (`rchar` of /proc/self/io).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = 8


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """One restore: what it took, and the bytes of the leaves, all copies of them, and the most memory beyond those."""

    seconds: float
    cpu_seconds: float
    reader_nbytes: int
    kernel_nbytes: int
    leaf_nbytes: int
    device_nbytes: int
    extra_peak_nbytes: int


def drop_page_cache(folder: Path) -> int:
    """Drop the pages of all files from the page cache; return their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


def read_process_counter(name: str) -> int:
    """Return a number of /proc/self: `rchar` of io, or a size of status, in bytes."""
    source, scale = ("io", 1) if name == "rchar" else ("status", 1024)
    lines = Path(f"/proc/self/{source}").read_text().splitlines()
    return next(int(line.split()[1]) * scale for line in lines if line.startswith(f"{name}:"))


def restore(path: Path, mesh: str, verify: bool, start: bool) -> RestoreCost:
    """Restore a checkpoint once, with cold files."""
    import jax

    from prepcli.restore.item_reader import open_reader
    from trainer.training.checkpoint import load_float32_params

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier restore freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    with open_reader(path, verify) as reader:
        setup = _setup(reader, mesh)
        drop_page_cache(path)
        before, read, began, cpu = (
            read_process_counter("RssAnon"),
            read_process_counter("rchar"),
            time.monotonic(),
            time.process_time(),
        )
        state = jax.block_until_ready(_state(reader, setup) if start else load_float32_params(reader, setup))
        seconds, cpu, read = time.monotonic() - began, time.process_time() - cpu, read_process_counter("rchar") - read
    leaves = jax.tree.leaves(state)
    on_devices = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    # VmHWM has file pages as well: the anonymous peak is at most that less what is mapped from files now
    beyond = read_process_counter("VmHWM") - read_process_counter("RssFile") - before - on_devices
    leaf_nbytes = sum(leaf.nbytes for leaf in leaves)
    return RestoreCost(seconds, cpu, reader.read_nbytes, read, leaf_nbytes, on_devices, beyond)


def _setup(reader: Any, mesh: str) -> Any:
    from trainer.distributed.sharding import make_sharding_context
    from trainer.models.mesh import parse_mesh
    from trainer.nn.transformer import ForwardConfig
    from trainer.recipe.tables import Optimizer
    from trainer.training.setup import build_optimizer, model_from_manifest, rules_from_manifest
    from trainer.training.step import StepSetup

    on = make_sharding_context(parse_mesh(mesh), rules_from_manifest(reader.facts))
    return StepSetup(
        model_from_manifest(reader.facts), ForwardConfig(sharding=on), build_optimizer(Optimizer(lr=1e-3), 10)
    )


def _state(reader: Any, setup: Any) -> Any:
    from trainer.training.checkpoint import init_state, restore_state

    return (restore_state if reader.facts["kind"] == "train" else init_state)(reader, setup)


def cost_text(cost: RestoreCost, verify: bool) -> str:
    """Return the line of one restore."""
    times, kernel = cost.reader_nbytes / cost.leaf_nbytes, cost.kernel_nbytes / cost.leaf_nbytes
    rate = f"{cost.seconds:6.2f} s ({cost.cpu_seconds:.2f} s of CPU), {cost.leaf_nbytes / cost.seconds / 1e9:.2f} GB/s"
    memory = f"at most {cost.extra_peak_nbytes / 2**20:,.0f} MiB beyond the arrays"
    return f"{'checked  ' if verify else 'unchecked'} {rate}, {times:.4f} x read (kernel: {kernel:.4f} x), {memory}"


def summary_text(pairs: Sequence[tuple[RestoreCost, RestoreCost]]) -> str:
    """Return the fastest of both kinds, and their ratios. The first of each pair is the checked one."""
    checked, unchecked = (min(found.seconds for found in side) for side in zip(*pairs))
    cpu = [sum(found.cpu_seconds for found in side) / len(pairs) for side in zip(*pairs)]
    wall = f"fastest {checked:.2f} s checked, {unchecked:.2f} s unchecked: {checked / unchecked:.3f} x"
    return f"{wall}; CPU {cpu[0]:.2f} s and {cpu[1]:.2f} s on average"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="an init, or the folder of a run")
    parser.add_argument("--mesh", default="1,2,4")
    parser.add_argument("--pairs", type=int, default=3, help="restores of each kind")
    parser.add_argument("--start", action="store_true", help="the whole state that training begins with")
    asked = parser.parse_args()
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    pairs: list[tuple[RestoreCost, RestoreCost]] = []
    restore(asked.checkpoint, asked.mesh, verify=False, start=asked.start)  # not counted: jax compiles and sets up
    for number in range(asked.pairs):
        found: dict[bool, RestoreCost] = {}
        for verify in (False, True) if number % 2 else (True, False):
            found[verify] = restore(asked.checkpoint, asked.mesh, verify, asked.start)
            print(cost_text(found[verify], verify), flush=True)
        pairs.append((found[True], found[False]))
    nbytes = pairs[0][0].leaf_nbytes
    print(f"{asked.checkpoint.name} on {asked.mesh}: {nbytes / 1e9:.2f} GB of leaves on {DEVICES} devices")
    print(summary_text(pairs))


if __name__ == "__main__":
    main()
