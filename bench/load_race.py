"""Race of loaders from a throttled bucket to the shards of a job: seconds, bytes, requests and memory.

    python -m bench.models llama-7b BUCKET/model --layers 2 --shard-gb 0.5
    prep save-init BUCKET/model --out BUCKET/item
    python -m bench.load_race BUCKET --work FOLDER --processes 1,2,4,8 --json race.json

BUCKET is a folder with a Hugging Face model and its Orbax item. `bench.throttled_store` serves it. Every process of a
load simulates a host: it has its own client and its own folder for downloads. The seconds begin when all processes
have imported their libraries, and end when the last one has its shards. The shards of all processes are compared with
the file by a sum over all values. `--kill` loads a second time: it kills all processes when half of the weights were
sent, starts them again and counts the bytes sent twice. `--python` names the interpreter of the processes, with other
loaders installed. A load ends with an error when its processes exceed `--max-gib` together.

Columns: `N` processes, `s` seconds, `CPU s` CPU seconds of all processes, `x sent` bytes of objects divided by the
weights, `x again` bytes sent twice with a kill, divided by the weights, `+MiB` anonymous memory of all processes
together beyond the start of the load and the shards.
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
from prepcli.core.formatting import format_bytes
from prepcli.core.tables import format_table
from prepcli.launch.local import free_port

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
GIB = 1 << 30
SAMPLE_S = 0.05
POLL_S = 0.02
MAX_LOAD_S = 900.0
# Some loaders hold several copies of the model in each process. The load ends before the machine is out of memory.
MIN_AVAILABLE_NBYTES = 3 << 30
MAX_GIB = 8.0
NO_TRAFFIC = Traffic()
HEADER = ("loader", "N", "split", "s", "CPU s", "x sent", "x again", "requests", "+MiB")


@dataclass(frozen=True)
class RaceRow:
    """One load by all processes of a job.

    Attributes:
        loader: A key of LOADERS.
        processes: Number of processes.
        split: Split of the matrices.
        seconds: Time from the start of all loads to the end of the last one.
        cpu_s: CPU time of the loads in all processes.
        traffic: Traffic of the store.
        weights_nbytes: Bytes of the weights in the bucket.
        peak_nbytes: Maximum anonymous memory of all processes together.
        start_nbytes: Their anonymous memory before the load.
        shard_nbytes: Bytes of the loaded shards together.
        again_nbytes: Bytes sent twice by a load that was killed at half and started again. None without such a load.
        error: The loader's error, or "".
    """

    loader: str
    processes: int
    split: str
    seconds: float = 0.0
    cpu_s: float = 0.0
    traffic: Traffic = NO_TRAFFIC
    weights_nbytes: int = 1
    peak_nbytes: int = 0
    start_nbytes: int = 0
    shard_nbytes: int = 0
    again_nbytes: int | None = None
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
        max_nbytes: Limit of the anonymous memory of all processes together.
    """

    store_url: str
    work: Path
    python: str
    weights_nbytes: int
    matrix_sum: int
    max_nbytes: int = int(MAX_GIB * GIB)

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

    The processes are killed when they exceed a limit together, or when the machine has less than MIN_AVAILABLE_NBYTES
    left.

    Attributes:
        peak_nbytes: Maximum since `mark_start`.
        start_nbytes: Memory at the last `mark_start`.
        error: Reason for which the processes were killed, or "".
    """

    def __init__(self, workers: Sequence[subprocess.Popen[str]], max_nbytes: int) -> None:
        self._workers = workers
        self._max_nbytes = max_nbytes
        self.error = ""
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
            nbytes = self.sample()
            self.peak_nbytes = max(self.peak_nbytes, nbytes)
            if not self.error:
                self.error = self._find_excess(nbytes)
            if self.error:
                kill_running(self._workers)

    def _find_excess(self, nbytes: int) -> str:
        """Return the reason to kill the processes, or ""."""
        if nbytes > self._max_nbytes:
            return f"killed: it took more than {format_bytes(self._max_nbytes)}"
        if available_nbytes() < MIN_AVAILABLE_NBYTES:
            return f"killed: it took {nbytes / MIB:,.0f} MiB, the machine has no more"
        return ""

    def mark_start(self) -> None:
        """Take the present memory as the start of the load."""
        self.start_nbytes = self.sample()
        self.peak_nbytes = self.start_nbytes

    def __enter__(self) -> MemorySampler:
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


@dataclass(frozen=True)
class WaitingLoad:
    """Processes that are ready to load.

    Attributes:
        workers: The processes.
        memory: Sampler of their memory.
        error: The first error of their start, or "".
    """

    workers: list[subprocess.Popen[str]]
    memory: MemorySampler
    error: str


@contextlib.contextmanager
def waiting_load(race: Race, loader: str, processes: int, split: str) -> Iterator[WaitingLoad]:
    """Yield processes ready to load. They are killed at the end of the block, or after MAX_LOAD_S."""
    workers = start_processes(race, loader, processes, split)
    limit = threading.Timer(MAX_LOAD_S, kill_running, [workers])
    limit.start()
    try:
        with MemorySampler(workers, race.max_nbytes) as memory:
            yield WaitingLoad(workers, memory, wait_for(workers, "ready"))
    finally:
        limit.cancel()
        kill_processes(workers)


def run_load(race: Race, loader: str, processes: int, split: str) -> RaceRow:
    """Load once in all processes, and return the row."""
    row = RaceRow(loader, processes, split, weights_nbytes=race.weights_nbytes)
    with waiting_load(race, loader, processes, split) as load:
        memory = load.memory
        error = load.error
        memory.mark_start()
        start_s = time.monotonic()
        if not error:
            start_load(load.workers)
            error = wait_for(load.workers, "loaded")
        seconds = time.monotonic() - start_s
        # The sums over the values of the shards are not part of the load.
        peak_nbytes = memory.peak_nbytes
        error = memory.error or error
        if error:
            return dataclasses.replace(row, error=error, traffic=race.traffic())
        results = [LoadResult(**json.loads(read_line(worker))) for worker in load.workers]
    return dataclasses.replace(
        row,
        seconds=seconds,
        cpu_s=sum(result.cpu_s for result in results),
        traffic=race.traffic(),
        peak_nbytes=peak_nbytes,
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
    with waiting_load(race, loader, processes, split) as load:
        if load.error:
            return load.memory.error or load.error
        start_load(load.workers)
        while race.traffic().nbytes < race.weights_nbytes // 2:
            if any(worker.poll() is not None for worker in load.workers):
                return load.memory.error or "a process ended before half of the weights were sent"
            time.sleep(POLL_S)
    return ""


def run_race(race: Race, loader: str, processes: int, split: str, kill: bool) -> RaceRow:
    """Load with cold downloads, and once more with a kill if asked for."""
    with cold_downloads(race):
        row = run_load(race, loader, processes, split)
    if not kill or row.error:
        return row
    with cold_downloads(race):
        error = kill_at_half(race, loader, processes, split)
        if error:
            return dataclasses.replace(row, error=f"with a kill: {error}")
        killed = run_load(race, loader, processes, split)
    if killed.error:
        return dataclasses.replace(row, error=f"after a kill: {killed.error}")
    return dataclasses.replace(row, again_nbytes=killed.traffic.repeated_nbytes)


@contextlib.contextmanager
def cold_downloads(race: Race) -> Iterator[None]:
    """Begin with no downloaded files and no traffic, and delete the downloads at the end."""
    shutil.rmtree(race.work, ignore_errors=True)
    race.ask_store("reset")
    try:
        yield
    finally:
        shutil.rmtree(race.work, ignore_errors=True)


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
    again = ""
    if row.again_nbytes is not None:
        again = f"{row.again_nbytes / row.weights_nbytes:.3f}"
    return (
        *start,
        f"{row.seconds:.1f}",
        f"{row.cpu_s:.1f}",
        f"{row.traffic.nbytes / row.weights_nbytes:.3f}",
        again,
        str(row.traffic.requests),
        f"{row.extra_nbytes / MIB:.0f}",
    )


def race_text(rows: Sequence[RaceRow]) -> str:
    """Return the table, and a line for each loader's error."""
    lines = [format_table([row_cells(row) for row in rows], HEADER, right_aligned=HEADER[3:])]
    errors: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error:
            counts = errors.setdefault((row.loader, row.error), [])
            counts.append(f"{row.processes} {row.split}")
    for (loader, error), counts in errors.items():
        lines.append(f"{loader} ({', '.join(counts)}): {error}")
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
    parser.add_argument("--kill", action="store_true", help="also load after a kill at half")
    parser.add_argument(
        "--max-gib", type=float, default=MAX_GIB, help="memory limit of all processes"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the processes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all loads, and print the table."""
    options = _parse_arguments(arguments)
    weights_nbytes, matrix_sum = matrices_of(options.bucket / "model")
    rows: list[RaceRow] = []
    first_load_average = os.getloadavg()[0]
    with serve_bucket(options.bucket, options.mib_s, options.delay_ms) as url:
        race = Race(
            url,
            options.work / "race",
            options.python,
            weights_nbytes,
            matrix_sum,
            max_nbytes=int(options.max_gib * GIB),
        )
        for processes in map(int, options.processes.split(",")):
            for split in options.splits.split(",") if processes > 1 else SPLITS[:1]:
                for loader in options.loaders.split(";"):
                    rows.append(run_race(race, loader, processes, split, options.kill))
                    print(
                        " ".join(row_cells(rows[-1])), rows[-1].error, file=sys.stderr, flush=True
                    )
    conditions = (
        f"{weights_nbytes / 1e9:.2f} GB, {options.mib_s:g} MiB/s per connection, "
        f"{options.delay_ms:g} ms per answer, "
        f"load average {first_load_average:.1f} to {os.getloadavg()[0]:.1f}"
    )
    print(conditions)
    print(race_text(rows))
    if options.json:
        figures = {"conditions": conditions, "rows": [row_json(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
