"""An init onto 8 CPU devices: bytes read for each byte stored, seconds, and memory beyond the arrays themselves.

    python -m bench.restore INIT --mesh 1,2,4

The files' pages are dropped from the page cache first (`posix_fadvise`); reads are those that the kernel counts as
asked for (`rchar` of /proc/self/io) while the parameters are restored.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

DEVICES = 8


def drop(folder: Path) -> int:
    """Forget the pages of all files; their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


def counted(name: str) -> int:
    """A number of /proc/self: `rchar` of io, or a size of status, in bytes."""
    source, scale = ("io", 1) if name == "rchar" else ("status", 1024)
    lines = Path(f"/proc/self/{source}").read_text().splitlines()
    return next(int(line.split()[1]) * scale for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("init", type=Path)
    parser.add_argument("--mesh", default="1,2,4")
    asked = parser.parse_args()
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    import jax

    from prepcli.reading.restore import open_reader
    from trainer.checkpoint import parameters
    from trainer.job import architecture, optimizer, rules_of
    from trainer.mesh import parse
    from trainer.model import Compute
    from trainer.recipe.tables import Optimizer
    from trainer.sharding import shards
    from trainer.step import Setup

    with open_reader(asked.init) as reader:
        on = shards(parse(asked.mesh), rules_of(reader.facts))
        adamw = optimizer(Optimizer(lr=1e-3), 10)
        setup = Setup(architecture(reader.facts), Compute(shards=on), adamw)
        stored = drop(asked.init)
        before, read, began = counted("RssAnon"), counted("rchar"), time.monotonic()
        params = jax.block_until_ready(parameters(reader, setup))
        took = time.monotonic() - began
        read = counted("rchar") - read
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # VmHWM has file pages as well: the anonymous peak is at most that less what is mapped from files now
    peak = counted("VmHWM") - counted("RssFile") - before
    print(f"{asked.init.name} on {asked.mesh}: {stored / 1e9:.2f} GB stored, {data / 1e9:.2f} GB of parameters")
    times, rate = f"{reader.read_nbytes / data:.4f} x (kernel: {read / data:.4f} x)", data / took / 1e9
    print(f"read {times} in {took:.1f} s, {rate:.2f} GB/s")
    print(f"arrays {held / 2**20:,.0f} MiB on {DEVICES} devices; at most {(peak - held) / 2**20:,.0f} MiB beyond them")


if __name__ == "__main__":
    main()
