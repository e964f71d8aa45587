"""Race of loaders from a throttled bucket to the shards of a job: seconds, bytes, requests and memory.

    python -m bench.models llama-7b BUCKET/model --layers 2 --shard-gb 0.5
    prep save-init BUCKET/model --out BUCKET/item
    python -m bench.load_race BUCKET --work FOLDER --processes 1,2,4,8 --json race.json

BUCKET is a folder with a Hugging Face model and its Orbax item. `bench.throttled_store` serves it. Every process of a
load simulates a host: it has its own client and its own folder for downloads. The seconds begin when all processes
have imported their libraries, and end when the last one has its shards. The shards of all processes are compared with
the file by a sum over all values. `--kill` kills all processes when half of the weights were sent, starts them again
and counts the bytes sent twice. `--python` names the interpreter of the processes, with other loaders installed.

Columns: `N` processes, `s` seconds, `x sent` and `x twice` bytes of objects divided by the weights, `MiB` anonymous
memory of all processes together, `+MiB` the part beyond the start of the load and the shards.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.meter import anonymous_nbytes, process_tree
from bench.race_loaders import LOADERS, NORM, SPLITS, Job, LoadResult, word_sum
from bench.throttled_store import Traffic
from prepcli.console.ui import format_table
from prepcli.launch.local import free_port

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
SAMPLE_S = 0.05
POLL_S = 0.02
MAX_LOAD_S = 900.0
# Some loaders hold several copies of the model in each process. The load ends before the machine is out of memory.
MIN_AVAILABLE_NBYTES = 3 << 30
NO_TRAFFIC = Traffic()
HEADER = ("loader", "N", "split", "s", "x sent", "x twice", "requests", "MiB", "+MiB")


@dataclass(frozen=True)
class RaceRow:
    """One load by all processes of a job.

    Attributes:
        loader: A key of LOADERS.
        processes: Number of processes.
        split: Split of the matrices.
        seconds: Time from the start of all loads to the end of the last one.
        traffic: Traffic of the store.
        weights_nbytes: Bytes of the weights in the bucket.
        peak_nbytes: Maximum anonymous memory of all processes together.
        start_nbytes: Their anonymous memory before the load.
        shard_nbytes: Bytes of the loaded shards together.
        error: The loader's error, or "".
    """

    loader: str
    processes: int
    split: str
    seconds: float = 0.0
    traffic: Traffic = NO_TRAFFIC
    weights_nbytes: int = 1
    peak_nbytes: int = 0
    start_nbytes: int = 0
    shard_nbytes: int = 0
    error: str = ""

    @property
    def extra_nbytes(self) -> int:
        """Peak memory beyond the start of the load and the loaded shards, of all processes."""
        return self.peak_nbytes - self.start_nbytes - self.shard_nbytes


@dataclass(frozen=True)
class Race:
    """The conditions of all loads.

    Attributes:
        store_url: URL of the store.
        work: Folder for downloads.
        python: Interpreter of the processes.
        weights_nbytes: Bytes of the weights in the bucket.
        matrix_sum: `word_sum` of the matrices in the bucket.
    """

    store_url: str
    work: Path
    python: str
    weights_nbytes: int
    matrix_sum: int

    def environment(self) -> dict[str, str]:
        """Return the variables of a process: this store for each client, and one CPU device."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "AWS_ENDPOINT_URL": self.store_url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            # It exchanges tensors over gloo only if it is asked to.
            "RUNAI_STREAMER_DIST": "1",
        }

    def ask_store(self, path: str) -> bytes:
        """Return the store's answer to a request of the harness."""
        with urllib.request.urlopen(f"{self.store_url}/-/{path}") as answer:
            return answer.read()

    def traffic(self) -> Traffic:
        """Return the traffic since the last reset."""
        return Traffic(**json.loads(self.ask_store("counts")))


def kill_running(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Kill all running processes."""
    for worker in workers:
        worker.kill()


def available_nbytes() -> int:
    """Return the free memory of the machine, reclaimable caches included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


class MemorySampler:
    """Maximum of the anonymous memory of some processes, sampled in a thread.

    The processes are killed when the machine has less than MIN_AVAILABLE_NBYTES left.
    """

    def __init__(self, workers: Sequence[subprocess.Popen[str]]) -> None:
        self._workers = workers
        self.is_exhausted = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_nbytes = 0
        self.start_nbytes = 0

    def sample(self) -> int:
        """Return the present memory, with all child processes."""
        members = set[int]()
        for worker in self._workers:
            members.update(process_tree(worker.pid))
        return sum(map(anonymous_nbytes, members))

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.peak_nbytes = max(self.peak_nbytes, self.sample())
            if available_nbytes() < MIN_AVAILABLE_NBYTES:
                self.is_exhausted = True
                kill_running(self._workers)

    def __enter__(self) -> MemorySampler:
        self.start_nbytes = self.sample()
        self.peak_nbytes = self.start_nbytes
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def start_processes(
    race: Race, loader: str, processes: int, split: str
) -> list[subprocess.Popen[str]]:
    """Start the processes of a load. They wait for a line on stdin."""
    port = free_port()
    workers: list[subprocess.Popen[str]] = []
    for index in range(processes):
        scratch = race.work / f"host-{index}"
        scratch.mkdir(parents=True, exist_ok=True)
        job = Job(race.store_url, index, processes, split, port, str(scratch))
        words = [race.python, "-m", "bench.race_loaders", loader]
        worker = subprocess.Popen(
            [*words, json.dumps(dataclasses.asdict(job))],
            env=race.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        workers.append(worker)
    return workers


def read_line(worker: subprocess.Popen[str]) -> str:
    """Return the next line of a process, or a result with an error if it has ended."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    while line and not line.startswith(("ready", "loaded", "{")):
        line = worker.stdout.readline()
    if line:
        return line.strip()
    result = LoadResult(error=f"the process ended with code {worker.wait()}")
    return json.dumps(dataclasses.asdict(result))


def wait_for(workers: Sequence[subprocess.Popen[str]], event: str) -> str:
    """Wait until each process prints an event, and return the first error, or ""."""
    for worker in workers:
        line = read_line(worker)
        if line != event:
            return LoadResult(**json.loads(line)).error
    return ""


def start_load(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Let all processes begin to load."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()


def kill_processes(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Kill all running processes, and wait for all."""
    kill_running(workers)
    for worker in workers:
        worker.communicate()


@contextlib.contextmanager
def waiting_processes(
    race: Race, loader: str, processes: int, split: str
) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    """Yield processes ready to load, and the first error of their start.

    They are killed at the end of the block, or after MAX_LOAD_S.
    """
    workers = start_processes(race, loader, processes, split)
    limit = threading.Timer(MAX_LOAD_S, kill_running, [workers])
    limit.start()
    try:
        yield workers, wait_for(workers, "ready")
    finally:
        limit.cancel()
        kill_processes(workers)


def run_load(race: Race, loader: str, processes: int, split: str) -> RaceRow:
    """Load once in all processes, and return the row."""
    row = RaceRow(loader, processes, split, weights_nbytes=race.weights_nbytes)
    with waiting_processes(race, loader, processes, split) as (workers, error):
        if error:
            return dataclasses.replace(row, error=error)
        with MemorySampler(workers) as memory:
            start_s = time.monotonic()
            start_load(workers)
            error = wait_for(workers, "loaded")
            seconds = time.monotonic() - start_s
        if memory.is_exhausted:
            error = f"killed: it took {memory.peak_nbytes / MIB:,.0f} MiB, the machine has no more"
        if error:
            return dataclasses.replace(row, error=error, traffic=race.traffic())
        results = [LoadResult(**json.loads(read_line(worker))) for worker in workers]
    return dataclasses.replace(
        row,
        seconds=seconds,
        traffic=race.traffic(),
        peak_nbytes=memory.peak_nbytes,
        start_nbytes=memory.start_nbytes,
        shard_nbytes=sum(result.nbytes for result in results),
        error=find_error(results, race.matrix_sum),
    )


def find_error(results: Sequence[LoadResult], matrix_sum: int) -> str:
    """Return the first error of the processes, or "" if their shards are those of the bucket."""
    errors = [result.error for result in results if result.error]
    if errors:
        return errors[0]
    total = sum(result.word_sum for result in results) % (1 << 64)
    return "" if total == matrix_sum else "the shards have other values than the bucket"


def kill_at_half(race: Race, loader: str, processes: int, split: str) -> str:
    """Start a load, and kill all processes when half of the weights were sent. Return an error, or ""."""
    with waiting_processes(race, loader, processes, split) as (workers, error):
        if error:
            return error
        start_load(workers)
        while race.traffic().nbytes < race.weights_nbytes // 2:
            if any(worker.poll() is not None for worker in workers):
                return "a process ended before half of the weights were sent"
            time.sleep(POLL_S)
    return ""


def run_race(race: Race, loader: str, processes: int, split: str, kill: bool) -> RaceRow:
    """Load with cold downloads, after a killed load if asked for."""
    shutil.rmtree(race.work, ignore_errors=True)
    race.ask_store("reset")
    error = ""
    if kill:
        error = kill_at_half(race, loader, processes, split)
    if error:
        row = RaceRow(loader, processes, split, error=error)
    else:
        row = run_load(race, loader, processes, split)
    shutil.rmtree(race.work, ignore_errors=True)
    return row


def matrices_of(folder: Path) -> tuple[int, int]:
    """Return the bytes of a model's weights and the `word_sum` of its matrices, read by safetensors."""
    from safetensors import safe_open

    nbytes = 0
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                tensor = file.get_tensor(name)
                nbytes += tensor.nbytes
                if NORM not in name:
                    total += word_sum([tensor])
    return nbytes, total % (1 << 64)


def row_cells(row: RaceRow) -> tuple[str, ...]:
    """Return the cells of a table's row. An error replaces the figures."""
    start = (row.loader, str(row.processes), row.split)
    if row.error:
        return (*start, "error", *("",) * (len(HEADER) - 4))
    return (
        *start,
        f"{row.seconds:.1f}",
        f"{row.traffic.nbytes / row.weights_nbytes:.3f}",
        f"{row.traffic.repeated_nbytes / row.weights_nbytes:.3f}",
        str(row.traffic.requests),
        f"{row.peak_nbytes / MIB:.0f}",
        f"{row.extra_nbytes / MIB:.0f}",
    )


def race_text(rows: Sequence[RaceRow]) -> str:
    """Return the table, and a line for each loader's error."""
    lines = [format_table([row_cells(row) for row in rows], HEADER, right_aligned=HEADER[3:])]
    errors: dict[str, str] = {}
    for row in rows:
        if row.error:
            errors.setdefault(row.loader, row.error)
    lines += [f"{loader}: {error}" for loader, error in errors.items()]
    return "\n".join(lines)


def row_json(row: RaceRow) -> Mapping[str, object]:
    """Return a row as JSON."""
    return dataclasses.asdict(row) | {"extra_nbytes": row.extra_nbytes}


@contextlib.contextmanager
def serve_bucket(bucket: Path, mib_s: float, delay_ms: float) -> Iterator[str]:
    """Serve the bucket from another process, and yield its URL."""
    words = [sys.executable, "-m", "bench.throttled_store", str(bucket)]
    words += ["--mib-s", str(mib_s), "--delay-ms", str(delay_ms)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bucket", type=Path, help="folder with `model` and `item`")
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads")
    parser.add_argument("--loaders", default=";".join(LOADERS), help="names, separated by `;`")
    parser.add_argument("--processes", default="1,2,4,8", help="numbers of processes")
    parser.add_argument("--splits", default=",".join(SPLITS), help="rows, columns or both")
    parser.add_argument("--mib-s", type=float, default=16, help="rate of each connection")
    parser.add_argument("--delay-ms", type=float, default=20, help="delay of each answer")
    parser.add_argument("--kill", action="store_true", help="load after a kill at half")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the processes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all loads, and print the table."""
    options = _parse_arguments(arguments)
    weights_nbytes, matrix_sum = matrices_of(options.bucket / "model")
    rows: list[RaceRow] = []
    with serve_bucket(options.bucket, options.mib_s, options.delay_ms) as url:
        race = Race(url, options.work / "race", options.python, weights_nbytes, matrix_sum)
        for processes in map(int, options.processes.split(",")):
            for split in options.splits.split(",") if processes > 1 else SPLITS[:1]:
                for loader in options.loaders.split(";"):
                    rows.append(run_race(race, loader, processes, split, options.kill))
                    print(
                        " ".join(row_cells(rows[-1])), rows[-1].error, file=sys.stderr, flush=True
                    )
    conditions = (
        f"{weights_nbytes / 1e9:.2f} GB, {options.mib_s:g} MiB/s per connection, "
        f"{options.delay_ms:g} ms per answer, load average {os.getloadavg()[0]:.1f}"
    )
    print(conditions)
    print(race_text(rows))
    if options.json:
        figures = {"conditions": conditions, "rows": [row_json(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
