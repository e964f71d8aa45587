"""Restore a checkpoint onto 8 CPU devices, with and without checksums: seconds, bytes read, peak memory.

    python -m bench.restore INIT --mesh 1,2,4 --pairs 5
    python -m bench.restore RUN --mesh 1,2,4 --pairs 5 --start

Without `--start`, only the parameters are restored. With it, the whole initial state of `prep train` is restored: the
parameters of an init with a new optimizer state, or the last step of a run. The page cache of the files is dropped
before each restore (`posix_fadvise`). Bytes read are the `rchar` counter of /proc/self/io.
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
    """Cost of one restore: time, bytes read, bytes of the leaves and their copies, peak memory beyond these."""

    seconds: float
    cpu_seconds: float
    reader_nbytes: int
    kernel_nbytes: int
    leaf_nbytes: int
    device_nbytes: int
    extra_peak_nbytes: int


def drop_page_cache(folder: Path) -> int:
    """Drop the pages of all files from the page cache, and return their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


def read_process_counter(name: str) -> int:
    """Return a counter of /proc/self in bytes: `rchar` of io, or a size of status."""
    source, scale = ("io", 1) if name == "rchar" else ("status", 1024)
    lines = Path(f"/proc/self/{source}").read_text().splitlines()
    return next(int(line.split()[1]) * scale for line in lines if line.startswith(f"{name}:"))


def restore(path: Path, mesh: str, verify: bool, start: bool) -> RestoreCost:
    """Restore a checkpoint once, with cold files."""
    import jax

    from prepcli.restore.item_reader import open_reader
    from trainer.training.checkpoint import load_params

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory of earlier restores
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak RSS
    with open_reader(path, verify) as reader:
        setup = make_setup(reader, mesh)
        drop_page_cache(path)
        start_nbytes, read_nbytes, start_s, cpu_s = (
            read_process_counter("RssAnon"),
            read_process_counter("rchar"),
            time.monotonic(),
            time.process_time(),
        )
        state = jax.block_until_ready(
            read_state(reader, setup)
            if start
            else load_params(
                reader, setup.model, sharding=setup.sharding, dtype_of=lambda path: "float32"
            )
        )
        duration_s, cpu_s, read_nbytes = (
            time.monotonic() - start_s,
            time.process_time() - cpu_s,
            read_process_counter("rchar") - read_nbytes,
        )
    leaves = jax.tree.leaves(state)
    on_devices = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    # VmHWM includes file pages: the anonymous peak is at most VmHWM minus the current file pages
    extra_peak_nbytes = (
        read_process_counter("VmHWM") - read_process_counter("RssFile") - start_nbytes - on_devices
    )
    leaf_nbytes = sum(leaf.nbytes for leaf in leaves)
    return RestoreCost(
        seconds=duration_s,
        cpu_seconds=cpu_s,
        reader_nbytes=reader.read_nbytes,
        kernel_nbytes=read_nbytes,
        leaf_nbytes=leaf_nbytes,
        device_nbytes=on_devices,
        extra_peak_nbytes=extra_peak_nbytes,
    )


def make_setup(reader: Any, mesh: str) -> Any:
    """Return the StepSetup of a checkpoint's model with AdamW on a mesh."""
    from prepcli.models.mesh import parse_mesh
    from trainer.distributed.sharding import make_sharding_context
    from trainer.nn.model_spec import ForwardConfig, model_from_manifest, rules_from_manifest
    from trainer.recipe.optimizer_tables import AdamWTable
    from trainer.training.optimizers import build_optimizer
    from trainer.training.step import StepSetup

    sharding = make_sharding_context(parse_mesh(mesh), rules_from_manifest(reader.manifest))
    return StepSetup(
        model_from_manifest(reader.manifest),
        ForwardConfig(sharding=sharding),
        build_optimizer(AdamWTable(lr=1e-3), 10),
    )


def read_state(reader: Any, setup: Any) -> Any:
    """Return the state of a saved step, or the initial state of an init."""
    from trainer.training.checkpoint import init_state, restore_state

    return (restore_state if reader.manifest["kind"] == "train" else init_state)(reader, setup)


def cost_text(cost: RestoreCost, verify: bool) -> str:
    """Return one line with the time, throughput, bytes read and peak memory of a restore."""
    read_ratio, kernel_ratio = (
        cost.reader_nbytes / cost.leaf_nbytes,
        cost.kernel_nbytes / cost.leaf_nbytes,
    )
    rate = f"{cost.seconds:6.2f} s ({cost.cpu_seconds:.2f} s of CPU), {cost.leaf_nbytes / cost.seconds / 1e9:.2f} GB/s"
    memory = f"at most {cost.extra_peak_nbytes / 2**20:,.0f} MiB beyond the arrays"
    ratios = f"{read_ratio:.4f} x read (kernel: {kernel_ratio:.4f} x)"
    return f"{'checked  ' if verify else 'unchecked'} {rate}, {ratios}, {memory}"


def summary_text(pairs: Sequence[tuple[RestoreCost, RestoreCost]]) -> str:
    """Return the fastest restores of both kinds and their ratio. The first of each pair is the checked one."""
    checked, unchecked = (min(cost.seconds for cost in costs) for costs in zip(*pairs))
    cpu = [sum(cost.cpu_seconds for cost in costs) / len(pairs) for costs in zip(*pairs)]
    wall = (
        f"fastest {checked:.2f} s checked, {unchecked:.2f} s unchecked: {checked / unchecked:.3f} x"
    )
    return f"{wall}; CPU {cpu[0]:.2f} s and {cpu[1]:.2f} s on average"


def main() -> None:
    """Restore in pairs and print the costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of an init or a run")
    parser.add_argument("--mesh", default="1,2,4")
    parser.add_argument("--pairs", type=int, default=3, help="number of restores of each kind")
    parser.add_argument(
        "--start", action="store_true", help="restore the whole initial state of training"
    )
    options = parser.parse_args()
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    pairs: list[tuple[RestoreCost, RestoreCost]] = []
    # A warm-up, which is not counted: JAX compiles its programs.
    restore(options.checkpoint, options.mesh, verify=False, start=options.start)
    for number in range(options.pairs):
        costs: dict[bool, RestoreCost] = {}
        for verify in (False, True) if number % 2 else (True, False):
            costs[verify] = restore(options.checkpoint, options.mesh, verify, options.start)
            print(cost_text(costs[verify], verify), flush=True)
        pairs.append((costs[True], costs[False]))
    nbytes = pairs[0][0].leaf_nbytes
    print(
        f"{options.checkpoint.name} on {options.mesh}: {nbytes / 1e9:.2f} GB of leaves on {DEVICES} devices"
    )
    print(summary_text(pairs))


if __name__ == "__main__":
    main()
