"""Rate and memory of `prep tokenize` with several processes, also killed ones, and the bytes of its store.

    python -m bench.tokenize_processes --work FOLDER [--megabytes 2000] [--processes 1,2,4] [--threads 1]
    python -m bench.tokenize_processes --work FOLDER --corpus DATA --processes 1,4 --kills 20

The corpus of `bench.tokenize` is divided into 16 files. `--corpus` names a folder of other files, with the column
`text`. The processes of a round start together, each with `--threads` encoding threads. The time is from the first
start to the complete store, imports included. `--kills` adds a round with the last number of processes: a process is
killed at random moments and started again. Every store must have the digests of the first one.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.evidence import log
from bench.meter import anonymous_nbytes
from bench.tokenize import CORPUS, STORES, TOKENIZER, VOCAB, write_corpus
from prepcli.core.tables import format_table
from trainer.data.examples import ExampleSettings
from trainer.data.store import StoreMeta, read_meta
from trainer.data.tokenize import tokenize_share
from trainer.data.tokenize_config import TokenizeConfig

N_FILES = 16
FILES = "files"
SAMPLE_S = 0.1
MIB = 1 << 20


def main() -> None:
    """Measure each number of processes, or do the share of one process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kill-every", type=float, default=20, metavar="SECONDS")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    args = parser.parse_args()
    corpus = args.corpus or args.work / FILES
    if args.share is not None:
        of, process = map(int, args.share.split("/"))
        make_share(args.work, corpus, process, of)
        return
    if args.corpus is None:
        write_files(args.work, args.megabytes * 1_000_000)
    kills = Kills(args.kills, args.kill_every)
    bench = ProcessBench(args.work, corpus, args.threads)
    print(bench.measure([int(count) for count in args.processes.split(",")], kills))


def write_files(folder: Path, nbytes: int) -> None:
    """Write the corpus as files of consecutive lines."""
    shutil.rmtree(folder / FILES, ignore_errors=True)
    (folder / FILES).mkdir(parents=True)
    write_corpus(folder, nbytes)
    with (folder / CORPUS).open() as corpus:
        for index in range(N_FILES):
            with (folder / FILES / f"{index:02d}.jsonl").open("w") as file:
                while file.tell() < nbytes / N_FILES and (line := corpus.readline()):
                    file.write(line)
    (folder / CORPUS).unlink()


def make_share(folder: Path, corpus: Path, process: int, of: int) -> StoreMeta | None:
    """Do the share of a process, and return the metadata of a complete store."""
    config = TokenizeConfig(
        type="auto",
        paths=(str(corpus),),
        examples=ExampleSettings(fields="text"),
        seq_length=1024,
        tokenizer=folder / TOKENIZER,
        vocab=VOCAB,
        cache=folder / STORES,
    )
    return tokenize_share(
        config, process, of, progress=lambda *counts: None, note=lambda text: None
    ).meta


@dataclass(slots=True)
class Kills:
    """Random moments of kills, about `every_s` seconds apart.

    Attributes:
        remaining: Number of kills to come.
        every_s: Mean time between two of them.
        rng: Source of the moments and of the processes.
        next_s: Time of the next kill.
    """

    remaining: int
    every_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    next_s: float = 0.0

    def start(self) -> None:
        """Set the moment of the next kill."""
        self.next_s = time.perf_counter() + self.rng.uniform(0, 2 * self.every_s)

    def kill_one(self, running: Sequence[int]) -> None:
        """Kill a random process if its moment has come."""
        if self.remaining and running and time.perf_counter() >= self.next_s:
            os.kill(self.rng.choice(running), signal.SIGKILL)
            self.remaining -= 1
            self.start()


NO_KILLS = Kills(0, 0)


@dataclass(slots=True)
class RoundCost:
    """Cost of a round.

    Attributes:
        wall_s: Seconds from the first start to the complete store.
        cpu_s: User and system time of all processes, also of killed ones.
        peak_nbytes: Largest anonymous memory of a process.
        n_kills: Number of killed processes.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_nbytes: int = 0
    n_kills: int = 0


@dataclass(frozen=True, slots=True)
class ProcessBench:
    """Rounds of processes that tokenize one corpus.

    Attributes:
        folder: Folder of the tokenizer and of the stores.
        corpus: Folder of the data files.
        threads: Encoding threads of each process.
    """

    folder: Path
    corpus: Path
    threads: int

    def measure(self, counts: Sequence[int], kills: Kills) -> str:
        """Return a table of the rounds. Raise SystemExit if a store differs from the first one."""
        rounds = [(count, NO_KILLS) for count in counts]
        if kills.remaining:
            rounds.append((counts[-1], kills))
        megabytes = sum(path.stat().st_size for path in self.corpus.iterdir()) / 1e6
        rows: list[tuple[str, ...]] = []
        first_meta: StoreMeta | None = None
        for of, round_kills in rounds:
            shutil.rmtree(self.folder / STORES, ignore_errors=True)
            cost = self.run_round(of, round_kills)
            meta = read_store_meta(self.folder)
            first_meta = first_meta or meta
            if meta != first_meta:
                raise SystemExit(f"the store of {of} processes differs")
            rows.append(_row(of, cost, megabytes))
            log(f"{of} processes: {cost}, load {os.getloadavg()[0]:.1f}, tokens {meta}")
        header = ("processes", "kills", "wall s", "CPU s", "MB/s", "MB per CPU s", "peak MiB")
        return format_table(rows, header, right_aligned=header)

    def run_round(self, of: int, kills: Kills) -> RoundCost:
        """Run the processes of a round. A killed one starts again."""
        cost = RoundCost()
        started_s = time.perf_counter()
        running = {self.start_process(process, of): process for process in range(of)}
        kills.start()
        while running:
            time.sleep(SAMPLE_S)
            cost.peak_nbytes = max(cost.peak_nbytes, *map(anonymous_nbytes, running))
            kills.kill_one(list(running))
            for pid in list(running):
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                if not ended:
                    continue
                process = running.pop(pid)
                cost.cpu_s += usage.ru_utime + usage.ru_stime
                exit_code = os.waitstatus_to_exitcode(status)
                if exit_code == -signal.SIGKILL:
                    cost.n_kills += 1
                    running[self.start_process(process, of)] = process
                elif exit_code:
                    raise SystemExit(f"process {process} ended with {exit_code}")
        cost.wall_s = time.perf_counter() - started_s
        return cost

    def start_process(self, process: int, of: int) -> int:
        """Start a process, and return its id."""
        arguments = ("--work", self.folder, "--corpus", self.corpus, "--share", f"{of}/{process}")
        command = [sys.executable, "-m", "bench.tokenize_processes", *map(str, arguments)]
        environment = os.environ | {"RAYON_NUM_THREADS": str(self.threads)}
        return subprocess.Popen(command, env=environment).pid


def _row(of: int, cost: RoundCost, megabytes: float) -> tuple[str, ...]:
    """Return the row of a round."""
    return (
        str(of),
        str(cost.n_kills),
        f"{cost.wall_s:.0f}",
        f"{cost.cpu_s:.0f}",
        f"{megabytes / cost.wall_s:.2f}",
        f"{megabytes / cost.cpu_s:.2f}",
        f"{cost.peak_nbytes / MIB:.0f}",
    )


def read_store_meta(folder: Path) -> StoreMeta:
    """Return the metadata of the only store, with checked digests."""
    (store,) = [path for path in (folder / STORES).iterdir() if path.is_dir()]
    return read_meta(store)


if __name__ == "__main__":
    main()
