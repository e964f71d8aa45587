"""Kill conversions and training runs during writes to a bucket with faults, and start them again on an empty disk.

    python -m bench.bucket_kills --work FOLDER [--kinds conversion,compression,training] [--processes 1,2,4]

The bucket is a fake store on the loopback interface. Every answer is late, and a share of the requests is refused (429,
503) or cut, before or after the store has done the work. A repeated write gets 412 if the answer to the first was lost.
All processes of a command are killed with SIGKILL after a random number of writes, and started again in a new empty
folder, until there were enough kills. A complete output is compared with an undisturbed one, and deleted. `sent` has
the bytes of accepted requests, `needed` is the size of the written outputs.
`again` counts writes of objects stored before. A killed save of a training run is written again. `file` is the disk
space of the largest local file. `memory` is the anonymous memory of one process, less that of `prep inspect` on the
same model, or that of the same training run in a local folder.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.bucket_outputs import FileWatch, empty_folder, run_module
from bench.meter import anonymous_nbytes
from prepcli.core.tables import format_table
from prepcli.formats.manifest import MANIFEST_FILE, RECIPE_FILE
from tests.helpers.fork_server import ForkedProcess, start_prep
from tests.helpers.object_server import OTHER_FAULTS, WRITE_FAULTS, FakeObjectStore, serve_objects
from tests.helpers.processes import start_processes
from tests.helpers.tiny_checkpoints import LLAMA
from tests.helpers.training_folder import make_training_folder
from tests.helpers.waiting import MAX_S, wait_until
from trainer.run.run_record import ENVIRONMENT_FILE
from trainer.training.metrics import METRICS_FILE

ROOT = Path(__file__).parents[1]
URL = "gs://bucket/out"
PREFIX = "bucket/out/"
MIB = 1 << 20
# No process of a conversion can write a longer local file.
MAX_FILE_NBYTES = MIB
DELAY_S = 0.02
READ_FAULTS = ("drop", "empty", "short", "refuse", "busy", "limit")
# Of the processes of one start, each is killed up to so long after the first one.
STAGGER_S = 0.05
STEPS = 4
SETTINGS = {
    "mesh": "1,2,2",
    "checkpoint.every": "1",
    "checkpoint.keep": "'all'",
    "data.holdout": "0",
    "train.steps": str(STEPS),
}
# 3.4 million parameters, so that the data file of each of four processes is sent in parts.
TRAINED = LLAMA | {"vocab_size": 2001, "hidden_size": 256, "intermediate_size": 688}
RUN_FILES = (RECIPE_FILE, METRICS_FILE, ENVIRONMENT_FILE)
COLUMNS = ("kind", "processes", "kills", "equal", "sent", "needed", "again", "file", "memory")


@dataclass(frozen=True)
class Command:
    """A command with an output in a bucket.

    Attributes:
        start: Starts all processes in a folder, given an output.
        last_object: The last object of an output.
        writes_per_process: Kills come after at most so many writes of each process.
        baseline_nbytes: Anonymous memory of a process without an output in a bucket.
        can_have_sparse_files: Whether the command reads a checkpoint in the bucket. It then has files without blocks,
            as long as the objects.
    """

    start: Callable[[Path, str], Sequence[ForkedProcess]]
    last_object: str
    writes_per_process: int
    baseline_nbytes: int
    can_have_sparse_files: bool = False


@dataclass
class Outcome:
    """Counts of a row.

    Attributes:
        kills: Killed processes.
        sent_nbytes: Bytes of accepted writes.
        lost_nbytes: Bytes among them of incomplete multipart uploads.
        needed_nbytes: Bytes of the written outputs.
        again: Repeated writes of an object in the same output.
        file_nbytes: Size of the largest local file.
        memory_nbytes: Peak anonymous memory of a process.
        is_equal: Whether all outputs had the bytes of an undisturbed one.
    """

    kills: int = 0
    sent_nbytes: int = 0
    lost_nbytes: int = 0
    needed_nbytes: int = 0
    again: int = 0
    file_nbytes: int = 0
    memory_nbytes: int = 0
    is_equal: bool = True
    faults: Counter[str] = field(default_factory=Counter[str])


class MemoryWatch:
    """The peak anonymous memory of the largest of some processes, sampled."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_nbytes = 0
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_nbytes = max(self.peak_nbytes, *map(anonymous_nbytes, self._pids))

    def stop(self) -> int:
        """Stop, and return the peak in bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak_nbytes


def main() -> None:
    """Measure all rows, and print a table."""
    options = parse_options()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: list[tuple[str | int, ...]] = []
    for kind in options.kinds.split(","):
        for count in map(int, options.processes.split(",")):
            command = make_command(kind, work, count, options)
            outcome = kill_repeatedly(command, work, options, rng=random.Random(options.seed))
            faults = ", ".join(f"{name} {n}" for name, n in sorted(outcome.faults.items()))
            parts = f"{outcome.lost_nbytes / MIB:.1f} MiB in parts of interrupted uploads"
            print(f"{kind}, {count} processes: {parts}; faults: {faults}", flush=True)
            rows.append(table_row(kind, count, outcome))
    print(format_table(rows, COLUMNS, right_aligned=COLUMNS[4:]))


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--kinds", default="conversion,compression,training")
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes")
    parser.add_argument("--kills", type=int, default=20, help="least number of kills of each row")
    parser.add_argument("--rate", type=float, default=0.05, help="share of requests with a fault")
    parser.add_argument("--memory", default="128MiB", help="memory limit of a conversion's process")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def table_row(kind: str, count: int, outcome: Outcome) -> tuple[str | int, ...]:
    """Return the cells of a row. Sizes are in MiB, the local file in KiB."""
    return (
        kind,
        count,
        outcome.kills,
        "yes" if outcome.is_equal else "NO",
        f"{outcome.sent_nbytes / MIB:.1f}",
        f"{outcome.needed_nbytes / MIB:.1f}",
        outcome.again,
        f"{outcome.file_nbytes / 1024:.0f}",
        f"{outcome.memory_nbytes / MIB:.0f}",
    )


# Commands


def make_command(kind: str, work: Path, count: int, options: argparse.Namespace) -> Command:
    """Return a command in `count` processes. The first call makes its source."""
    if kind == "training":
        return make_training(work, count)
    compression = ("--compress", "zstd") if kind == "compression" else ()
    return make_conversion(work, count, options.memory, compression)


def make_conversion(work: Path, count: int, memory: str, compression: Sequence[str]) -> Command:
    """Return `save-init` of 4 layers of GPT-Neo 125M, 268 MB. `compression` has its options `--compress`."""
    model = work / "model"
    if not model.exists():
        run_module("bench.models", "gpt-neo-125M", str(model), "--layers", "4")
    words = ("save-init", str(model), "--mesh", "1,8,1", "--memory", memory, "-q", *compression)

    def start(folder: Path, out: str) -> Sequence[ForkedProcess]:
        processes: list[ForkedProcess] = []
        for index in range(count):
            share = ("--out", out, "--processes", f"{count}/{index}")
            processes.append(start_prep(*words, *share, cwd=folder))
        return processes

    inspected = [start_prep("inspect", str(model), "-q", cwd=work)]
    return Command(start, MANIFEST_FILE, 10, measure_memory(inspected))


def make_training(work: Path, count: int) -> Command:
    """Return a training run with a save after each step."""
    source = work / "training"
    if not source.exists():
        source.mkdir()
        previous = Path.cwd()
        os.chdir(source)
        make_training_folder(TRAINED)
        os.chdir(previous)
    # The folder of a run has no copy of the model.
    paths = {"model.path": source / "tiny-init", "data.path": source / "text.txt"}
    words = ["train", str(source / "recipe.toml"), "-q"]
    for key, value in (SETTINGS | paths).items():
        words += ["--set", f"{key}={value}"]
    env = {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(folder: Path, out: str) -> Sequence[ForkedProcess]:
        return start_processes(
            *words, "--out", out, count=count, devices=4 // count, cwd=folder, env=env
        )

    with empty_folder(work / "empty") as folder:
        # The first run compiles the step.
        finish(start(folder, "first"))
        baseline_nbytes = measure_memory(start(folder, "second"))
    last_object = f"{STEPS}/{MANIFEST_FILE}"
    return Command(start, last_object, 30, baseline_nbytes, can_have_sparse_files=True)


def measure_memory(processes: Sequence[ForkedProcess]) -> int:
    """Return the peak anonymous memory of the largest process."""
    watch = MemoryWatch([process.pid for process in processes])
    finish(processes)
    return watch.stop()


def finish(processes: Sequence[ForkedProcess]) -> None:
    """Wait for processes. Raise AssertionError if one fails."""
    for process in processes:
        _, error = process.communicate(timeout=MAX_S)
        assert process.wait() == 0, error.decode()


# Kills


def kill_repeatedly(
    command: Command, work: Path, options: argparse.Namespace, *, rng: random.Random
) -> Outcome:
    """Write outputs, with kills, until there were enough of them. Return the counts."""
    expected = write_undisturbed(command, work)
    outcome = Outcome()
    with serving() as store:
        store.delay_s = DELAY_S
        for injector, kinds in (
            (store.faults, READ_FAULTS),
            (store.write_faults, WRITE_FAULTS),
            (store.other_faults, OTHER_FAULTS),
        ):
            injector.rate = options.rate
            injector.kinds = kinds
        while outcome.kills < options.kills:
            write_output(command, work, store, outcome, rng=rng, max_kills=options.kills)
            written = data_objects(store)
            outcome.is_equal &= written == expected
            outcome.needed_nbytes += sum(map(len, written.values()))
            stored = Counter(key for key in store.stored if is_data(key))
            outcome.again += sum(number - 1 for number in stored.values())
            outcome.sent_nbytes += accepted_nbytes(store)
            for parts in store.parts.values():
                outcome.lost_nbytes += sum(map(len, parts.values()))
            store.parts.clear()
            store.stored.clear()
            store.received.clear()
            store.refused.clear()
            store.objects.clear()
        for injector in (store.faults, store.write_faults, store.other_faults):
            outcome.faults.update(filter(None, injector.injected))
    outcome.memory_nbytes -= command.baseline_nbytes
    return outcome


def write_undisturbed(command: Command, work: Path) -> Mapping[str, bytes]:
    """Return the objects of an output without faults and kills."""
    with serving() as store, empty_folder(work / "empty") as folder:
        finish(command.start(folder, URL))
        return data_objects(store)


def write_output(
    command: Command,
    work: Path,
    store: FakeObjectStore,
    outcome: Outcome,
    *,
    rng: random.Random,
    max_kills: int,
) -> None:
    """Start a command until its output is complete, and kill it while there are kills left."""
    while f"{PREFIX}{command.last_object}" not in store.objects:
        with empty_folder(work / "empty") as folder:
            files = FileWatch(folder)
            num_writes = len(store.received)
            processes = command.start(folder, URL)
            pids = [process.pid for process in processes]
            if not command.can_have_sparse_files:
                limit_files(pids)
            memory = MemoryWatch(pids)
            if outcome.kills < max_kills:
                num_writes += rng.randrange(1, command.writes_per_process * len(processes))
                wait_until(partial(has_written, store, num_writes, processes))
                outcome.kills += kill_all(processes, rng)
            else:
                finish(processes)
            outcome.memory_nbytes = max(outcome.memory_nbytes, memory.stop())
            outcome.file_nbytes = max(outcome.file_nbytes, files.stop())
        # Requests of killed processes that have arrived
        wait_until(lambda: not store.num_running)


def limit_files(pids: Sequence[int]) -> None:
    """Let processes write no longer local files than MAX_FILE_NBYTES."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FILE_NBYTES, MAX_FILE_NBYTES))


def has_written(
    store: FakeObjectStore, num_writes: int, processes: Sequence[ForkedProcess]
) -> bool:
    """Return whether the store has received so many writes, or all processes have ended."""
    if len(store.received) >= num_writes:
        return True
    return all(process.poll() is not None for process in processes)


def kill_all(processes: Sequence[ForkedProcess], rng: random.Random) -> int:
    """Kill the processes in random order. Return the number of killed ones.

    Raises:
        AssertionError: A process has failed by itself.
    """
    num_killed = 0
    for process in rng.sample(processes, len(processes)):
        if process.poll() is None:
            process.kill()
            num_killed += 1
            time.sleep(rng.uniform(0, STAGGER_S))
    for process in processes:
        _, error = process.communicate(timeout=MAX_S)
        assert process.wait() in (0, -9), error.decode()
    return num_killed


@contextmanager
def serving() -> Iterator[FakeObjectStore]:
    """Serve an empty store, and name it in the environment."""
    with serve_objects() as store:
        os.environ.update(store.environment())
        yield store


def data_objects(store: FakeObjectStore) -> Mapping[str, bytes]:
    """Return the objects of a complete output, by key."""
    return {key: data for key, data in store.objects.items() if is_data(key)}


def is_data(key: str) -> bool:
    """Return whether an object is part of an output.

    The files of a training run are rewritten with each step, and `.prep` has the state of an incomplete output.
    """
    name = key.removeprefix(PREFIX)
    return ".prep" not in name and name not in RUN_FILES


def accepted_nbytes(store: FakeObjectStore) -> int:
    """Return the bytes of all accepted writes of data."""
    received = sum(nbytes for key, nbytes in store.received if is_data(key))
    return received - sum(nbytes for key, nbytes in store.refused if is_data(key))


if __name__ == "__main__":
    main()
