"""Compare outputs in a bucket, written from memory, with a local conversion and its upload.

    python -m bench.bucket_outputs --work FOLDER --model gpt-neo-1.3B --rounds 3

The bucket is a fake store on the loopback interface, in a process of its own. The ways alternate in each round. The
table has the median seconds, the peak memory of the process tree, the bytes received by the store, and the largest
file of the working folder. With `--kills`, each process is killed at a random moment and started again, on an empty
disk, until the output is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.meter import measure
from prepcli.stores.addresses import parse_url
from prepcli.stores.object_store import RETRIES, Bucket
from tests.helpers import loopback
from tests.helpers.object_server import FakeObjectStore, serve_objects

OUT_URL = "gs://bucket/out"
MIB = 1 << 20
BLOCK_NBYTES = 512  # unit of `st_blocks`


@dataclass(frozen=True)
class Row:
    """Cost of one way to an output: medians of seconds, memory and received bytes, and the largest local file."""

    seconds: float
    peak_nbytes: int
    received_nbytes: int
    disk_nbytes: int


def main() -> None:
    """Measure all ways, and print a table."""
    options = parse_options()
    if options.serve:
        serve_until_stdin_ends()
        return
    if options.upload:
        upload_folder(Path(options.upload))
        return
    work = options.work.resolve()
    model = work / "model"
    if not model.exists():
        words = [options.model, str(model)]
        if options.layers:
            words += ["--layers", str(options.layers)]
        run_module("bench.models", *words)
    commands = {
        "save-init": ("save-init", str(model), "--mesh", options.mesh),
        "export": ("export", str(work / "init")),
    }
    if not (work / "init").exists():
        run_module("prepcli", *commands["save-init"], "--out", str(work / "init"), "-q")
    print("command, way: seconds, peak MiB, received MiB, largest local file MiB")
    for name, command in commands.items():
        for way, row in compare_ways(work, command, options).items():
            print(
                f"{name}, {way}: {row.seconds:.2f}, {row.peak_nbytes / MIB:.0f},"
                f" {row.received_nbytes / MIB:.1f}, {row.disk_nbytes / MIB:.1f}",
                flush=True,
            )
        if options.kills:
            received_nbytes, needed_nbytes, num_runs = run_with_kills(work, command, options)
            print(
                f"{name}, {options.kills} kills of {options.kill_processes} processes:"
                f" {received_nbytes / MIB:.1f} MiB received for {needed_nbytes / MIB:.1f} MiB,"
                f" {num_runs} starts",
                flush=True,
            )


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder of the model and of local outputs")
    parser.add_argument("--model", default="gpt-neo-1.3B", help="alias, as for bench.models")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model, 0 for all")
    parser.add_argument("--mesh", default="1,8,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", default="1,2", help="numbers of processes")
    parser.add_argument("--memory", default="512MiB", help="memory limit of each process")
    parser.add_argument("--kills", type=int, default=0, help="number of kills")
    parser.add_argument("--kill-processes", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--upload", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is None and not (options.serve or options.upload):
        parser.error("--work is required")
    return options


def run_module(*words: str) -> None:
    """Run a module in a process of its own. Raise CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)


def compare_ways(work: Path, command: Sequence[str], options: argparse.Namespace) -> dict[str, Row]:
    """Measure a command in all ways, in turn."""
    counts = [int(count) for count in options.processes.split(",")]
    ways = ["local disk, then upload", *(f"from memory, {count} processes" for count in counts)]
    rows: dict[str, list[Row]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        rows[ways[0]].append(measure_staged(work, command, options.memory))
        for way, count in zip(ways[1:], counts):
            rows[way].append(measure_direct(work, command, count, options.memory))
    return {way: median_row(measured) for way, measured in rows.items()}


def median_row(rows: Sequence[Row]) -> Row:
    """Return the median of each figure."""
    return Row(
        statistics.median(row.seconds for row in rows),
        int(statistics.median(row.peak_nbytes for row in rows)),
        int(statistics.median(row.received_nbytes for row in rows)),
        max(row.disk_nbytes for row in rows),
    )


def measure_staged(work: Path, command: Sequence[str], memory: str) -> Row:
    """Convert into a local folder, sync it as prep does, and upload its files one after another."""
    staged = work / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    with serving_apart() as store:
        words = [*command, "--out", str(staged), "--memory", memory, "-q"]
        convert = [sys.executable, "-m", "prepcli", *words]
        upload = [sys.executable, "-m", "bench.bucket_outputs", "--upload", str(staged)]
        costs = [measure(convert), measure(upload)]
        received_nbytes = store_received(store)
    disk_nbytes = largest_file_nbytes(staged)
    shutil.rmtree(staged)
    seconds = sum(cost.wall_s for cost in costs)
    return Row(seconds, max(cost.peak_nbytes for cost in costs), received_nbytes, disk_nbytes)


def measure_direct(work: Path, command: Sequence[str], count: int, memory: str) -> Row:
    """Convert into the bucket, in several processes of one machine."""
    words = [*command, "--out", OUT_URL, "--memory", memory, "-q"]
    with serving_apart() as store, empty_folder(work / "empty") as folder:
        watch = FileWatch(folder)
        script = " & ".join(
            f"{sys.executable} -m prepcli {' '.join(words)} --processes {count}/{index}"
            for index in range(count)
        )
        with contextlib.chdir(folder):
            cost = measure(["bash", "-c", f"{script} & wait"])
        disk_nbytes = watch.stop()
        row = Row(cost.wall_s, cost.peak_nbytes, store_received(store), disk_nbytes)
        check_published(store)
    return row


def run_with_kills(
    work: Path, command: Sequence[str], options: argparse.Namespace
) -> tuple[int, int, int]:
    """Kill processes at random moments. Return the received and the needed bytes, and the number of starts."""
    rng = random.Random(0)
    count = options.kill_processes
    words = [*command, "--out", OUT_URL, "--memory", options.memory, "-q"]
    with serving_apart() as store:
        codes: list[int] = []
        for run in range(options.kills + 1):
            with empty_folder(work / "empty") as folder:
                running = [
                    subprocess.Popen(
                        [sys.executable, "-m", "prepcli", *words, "--processes", f"{count}/{i}"],
                        cwd=folder,
                    )
                    for i in range(count)
                ]
                if run < options.kills:
                    time.sleep(rng.uniform(1.0, 4.0))
                    for process in running:
                        process.send_signal(signal.SIGKILL)
                codes = [process.wait() for process in running]
        assert codes == [0] * count, codes
        check_published(store)
        received_nbytes = store_received(store)
        needed_nbytes = stored_nbytes(store)
    return received_nbytes, needed_nbytes, options.kills + 1


class FileWatch:
    """The size of the largest file below a folder and the folder of temporary files, looked at repeatedly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self._largest = max(self._largest, largest_file_nbytes(self._folder))

    def stop(self) -> int:
        """Stop, and return the size."""
        self._stop.set()
        self._thread.join()
        return self._largest


def largest_file_nbytes(folder: Path) -> int:
    """Return the disk space of the largest file below a folder. A sparse file uses less than its size."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            largest = max(largest, min(status.st_size, status.st_blocks * BLOCK_NBYTES))
    return largest


@contextlib.contextmanager
def empty_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder for the output and for temporary files, and remove it afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        del os.environ["TMPDIR"]
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving_apart() -> Iterator[str]:
    """Serve an empty store in a process of its own. Yield the address of its counts."""
    words = [sys.executable, "-m", "bench.bucket_outputs", "--serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        served = json.loads(server.stdout.readline())
        os.environ.update(served["environment"])
        try:
            yield served["counts"]
        finally:
            server.stdin.close()


def serve_until_stdin_ends() -> None:
    """Serve a store and its counts. Print the environment of clients and the address of the counts."""
    with serve_objects() as store, serve_counts(store) as counts:
        print(json.dumps({"environment": store.environment(), "counts": counts}), flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def serve_counts(store: FakeObjectStore) -> Iterator[str]:
    """Serve the counts of a store."""

    class Handler(loopback.Handler):
        def do_GET(self) -> None:
            """Answer with the bytes received and stored, and whether the manifest is there."""
            counts = {
                "received": sum(nbytes for _, nbytes in store.received),
                "stored": sum(map(len, store.objects.values())),
                "published": "bucket/out/prep-manifest.json" in store.objects,
            }
            body = json.dumps(counts).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with loopback.serve(Handler) as url:
        yield url


def read_counts(store: str) -> Mapping[str, int]:
    """Read the counts of a store."""
    with urllib.request.urlopen(store) as answer:
        return json.load(answer)


def store_received(store: str) -> int:
    """Return the bytes received by a store."""
    return read_counts(store)["received"]


def stored_nbytes(store: str) -> int:
    """Return the bytes of all objects."""
    return read_counts(store)["stored"]


def check_published(store: str) -> None:
    """Raise AssertionError unless the output is complete."""
    assert read_counts(store)["published"], "the output is incomplete"


def upload_folder(folder: Path) -> None:
    """Upload the files of a folder one after another."""
    bucket = Bucket(parse_url(OUT_URL), RETRIES)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.write(path.relative_to(folder).as_posix(), path)


if __name__ == "__main__":
    main()
