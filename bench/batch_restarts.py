"""The batches of 1 to 64 processes, and of random schedules of restarts, in NumPy, JAX and torch.

    python -m bench.batch_restarts --work FOLDER [--schedules 1000]

A tiny recipe is opened by `prep.batches` with blocks, with packed documents and with a mixture of two sources. Each
step has a digest of its rows. Three comparisons with the digests of one process:

- The shares of n processes, for each n from 1 to 64.
- Schedules of restarts: each start is at or before the last step taken, has another number of processes, and takes
  some steps. The arrays pass through NumPy, JAX or torch.
- Two ranks with two workers of torch's `DataLoader` each.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import prepcli as prep
from bench.evidence import log
from prepcli.commands.console.notebook import run_observer_of
from tests.helpers.training_folder import RECIPE, make_training_folder
from trainer.data.batches import BatchDigest, Batches
from trainer.data.order import RowOrder
from trainer.data.packing import Arrays, Dataset
from trainer.recipe import load_recipe
from trainer.run.recipe_data import recipe_datasets
from trainer.training.datasets import make_order

STEPS = 16
BATCH_SIZE = 64
MAX_PROCESSES = 64
MAX_STARTS = 5
N_RANKS = 2
N_WORKERS = 2
# Two workers of a rank have each second step.
LOADER_START = 3
SOURCES = """
[[data.sources]]
name = "near"
path = "text.txt"
weight = 3
[[data.sources]]
name = "far"
path = "other.txt"
weight = 1
"""
OVERRIDES = (f"batch.size={BATCH_SIZE}", f"train.steps={STEPS}")
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "blocks": ("recipe.toml", OVERRIDES),
    "documents": ("recipe.toml", (*OVERRIDES, "data.packing=documents")),
    "mixture": ("mixed.toml", OVERRIDES),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The rows of a recipe, and the digest of each step of one process."""

    dataset: Dataset
    order: RowOrder
    digests: tuple[str, ...]

    def shares(self, of: int, start: int) -> list[Batches]:
        """Open the shares of all processes at a step."""
        return [
            Batches(
                self.dataset,
                self.order,
                steps=STEPS,
                identity="",
                reopen=never_reopen,
                process=process,
                of=of,
                start=start,
            )
            for process in range(of)
        ]


def never_reopen() -> NoReturn:
    """Raise an error: nothing copies these batches."""
    raise AssertionError


def main() -> None:
    """Compare all batches, and print their number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--schedules", type=int, default=1000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(args.work):
        write_recipes()
        runs = {kind: open_run(*KINDS[kind]) for kind in KINDS}
        for kind, run in runs.items():
            n_shares = compare_processes(run, range(1, MAX_PROCESSES + 1))
            log(f"{kind}: {n_shares} shares of 1 to {MAX_PROCESSES} processes")
        # Before JAX starts threads, which workers made by a fork would not have.
        for kind, run in runs.items():
            log(f"{kind}: {compare_loaders(kind, run)} steps of {N_RANKS} ranks with workers")
        compare_schedules(runs, args.schedules)
    print("all batches are equal")


def write_recipes() -> None:
    """Write the recipes and their data to the current folder."""
    with contextlib.redirect_stdout(sys.stderr):
        make_training_folder()
    words = Path("text.txt").read_text().split()
    Path("other.txt").write_text(" ".join(reversed(words)))
    data, rest = RECIPE.split("[batch]")
    data = data.replace('type = "text"\npath = "text.txt"\n', "")
    Path("mixed.toml").write_text(f"{data}{SOURCES}\n[batch]{rest}")


def open_run(recipe: str, overrides: tuple[str, ...]) -> Run:
    """Open the data of a recipe, and read all steps in one process."""
    digests = [
        step_digest([batch], step)
        for step, batch in enumerate(prep.batches(recipe, overrides=overrides))
    ]
    loaded = load_recipe(Path(recipe), overrides).recipe
    datasets = recipe_datasets(
        loaded, out=None, offline=True, observer=run_observer_of(None), checks_digests=False
    ).build()
    order = make_order(datasets, BATCH_SIZE, seed=loaded.seed, shuffle=loaded.data.shuffle)
    return Run(datasets.train, order, tuple(digests))


def step_digest(shares: list[Arrays], step: int) -> str:
    """Return the digest of the rows of a step, given its shares in the order of the processes."""
    total = BatchDigest()
    first_row = 0
    for share in shares:
        digest = BatchDigest()
        digest.update(share, step, first_row)
        total.merge(digest)
        first_row += len(share["tokens"])
    return total.hexdigest()


def compare_processes(run: Run, counts: Iterable[int]) -> int:
    """Compare the batches of each number of processes, and return the number of shares."""
    n_shares = 0
    for of in counts:
        shares = run.shares(of, 0)
        for step in range(STEPS):
            check_step(run, [next(share) for share in shares], step)
        n_shares += of * STEPS
    return n_shares


def check_step(run: Run, shares: list[Arrays], step: int) -> None:
    """Raise SystemExit unless shares are the batch of one process."""
    if step_digest(shares, step) != run.digests[step]:
        raise SystemExit(f"step {step} of {len(shares)} processes differs")


def through_jax(batch: Arrays) -> Arrays:
    """Return the arrays after a copy to a device of JAX and back."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: np.asarray(jax.make_array_from_process_local_data(sharding, array))
        for name, array in batch.items()
    }


def through_torch(batch: Arrays) -> Arrays:
    """Return the arrays after a copy to a tensor of torch."""
    import torch

    return {name: torch.from_numpy(array).clone().numpy() for name, array in batch.items()}


FRAMEWORKS: Mapping[str, Callable[[Arrays], Arrays]] = {
    "numpy": lambda batch: batch,
    "jax": through_jax,
    "torch": through_torch,
}


def compare_schedules(runs: Mapping[str, Run], count: int) -> None:
    """Compare the batches of random schedules of restarts."""
    rng = random.Random(0)
    n_steps = n_starts = 0
    started_s = time.monotonic()
    for number in range(count):
        run = runs[rng.choice(sorted(runs))]
        convert = FRAMEWORKS[rng.choice(sorted(FRAMEWORKS))]
        for start, stop, of in random_starts(rng):
            shares = run.shares(of, start)
            for step in range(start, stop):
                check_step(run, [convert(next(share)) for share in shares], step)
            n_starts += 1
            n_steps += stop - start
        if (number + 1) % 100 == 0:
            seconds = time.monotonic() - started_s
            log(f"{number + 1} schedules, {n_starts} starts, {n_steps} steps, {seconds:.0f} s")


def random_starts(rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield the first step, the end and the number of processes of each start. The last one ends the run."""
    taken = 0
    n_starts = rng.randint(1, MAX_STARTS)
    for number in range(n_starts):
        start = rng.randint(max(0, taken - 4), taken)
        stop = STEPS
        if number + 1 < n_starts:
            stop = min(STEPS, start + rng.randint(0, 6))
        # Small and large numbers of processes are equally frequent.
        of = min(MAX_PROCESSES, round(2 ** rng.uniform(0, 6.1)))
        yield start, stop, of
        taken = max(taken, stop)


def compare_loaders(kind: str, run: Run) -> int:
    """Compare the batches of torch's DataLoader on each rank, and return the number of steps."""
    recipe, overrides = KINDS[kind]
    loaders: list[Any] = [
        make_loader(
            prep.batches(recipe, process=rank, of=N_RANKS, start=LOADER_START, overrides=overrides)
        )
        for rank in range(N_RANKS)
    ]
    step = LOADER_START
    for shares in zip(*loaders, strict=True):
        arrays = [{name: tensor.numpy() for name, tensor in share.items()} for share in shares]
        check_step(run, arrays, step)
        step += 1
    if step != STEPS:
        raise SystemExit(f"the loaders have {step} steps")
    return STEPS - LOADER_START


def make_loader(batches: Batches) -> Any:
    """Return a DataLoader with workers. Each of them takes its part of the steps."""
    import torch

    class StepDataset(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Arrays]:
            worker: Any = torch.utils.data.get_worker_info()
            for step in range(batches.step + worker.id, batches.steps, worker.num_workers):
                yield batches.batch(step)

    return torch.utils.data.DataLoader(StepDataset(), batch_size=None, num_workers=N_WORKERS)


if __name__ == "__main__":
    main()
