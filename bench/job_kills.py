"""Kill, stop or suspend one of two training processes, or set it up differently, and show what both do.

    python -m bench.job_kills --work FOLDER [--random 50] [--seed 1] [--timeout 10] [--cases] [--differences]

Each case trains a tiny model in two processes with two CPU devices each. A signal goes to one of them: at a named point
(`--cases`), or at a random time of the run (`--random`). `--differences` gives one process another clock, disk, recipe,
version, checkpoint or data instead (as root; with faketime). Then the same command runs again, without a fault. The
state after its last step must equal that of an undisturbed run, bit by bit. Prints one row per case, and the number of
wrong ones, which must be 0.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bench.job_differences import FILLER, full_disk_cases, make_differences, small_disk
from tests.helpers.job_faults import Fault, Outcome, run_job, state_digest
from tests.helpers.training_folder import make_training_folder

START_TIMEOUT = "20"
RUN, COMPILED = "run", "compiled"
MAX_CHARS = 300  # longest message in a row
CASES = (
    Fault("start: kill -9 of 0", "", 0, signal.SIGKILL, 0.3),
    Fault("start: kill -9 of 1", "", 1, signal.SIGKILL, 0.3),
    Fault("load: kill -9 of 0", "tokens in", 0, signal.SIGKILL),
    Fault("load: kill -9 of 1", "tokens in", 1, signal.SIGKILL),
    Fault("compile: kill -9 of 0", "tokens per step", 0, signal.SIGKILL, 1.0),
    Fault("compile: kill -9 of 1", "tokens per step", 1, signal.SIGKILL, 1.0),
    Fault("step: kill -9 of 0", "step +13/", 0, signal.SIGKILL),
    Fault("step: kill -9 of 1", "step +13/", 1, signal.SIGKILL),
    Fault("evaluate: kill -9 of 1", "step +10/", 1, signal.SIGKILL),
    Fault("save: kill -9 of 0", "evaluated at step 20", 0, signal.SIGKILL, 0.02),
    Fault("save: kill -9 of 1", "evaluated at step 20", 1, signal.SIGKILL, 0.02),
    Fault("commit: kill -9 of 0", "evaluated at step 20", 0, signal.SIGKILL, 0.15),
    Fault("SIGTERM to 1", "step +13/", 1, signal.SIGTERM),
    Fault("Ctrl-C on 0", "step +13/", 0, signal.SIGINT),
    Fault("SIGSTOP of 1", "step +13/", 1, signal.SIGSTOP),
    Fault("SIGSTOP of 0", "step +13/", 0, signal.SIGSTOP),
)


def main() -> None:
    """Run the cases and print their rows."""
    options = parse_options()
    folder = options.work.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    make_training_folder()
    start_s = time.monotonic()
    undisturbed = run_job(folder, "undisturbed", compiled=folder / COMPILED)
    duration_s = time.monotonic() - start_s
    if undisturbed.codes != (0, 0):
        raise SystemExit(f"the undisturbed run failed: {undisturbed}")
    expected = state_digest(folder / "undisturbed")
    print(
        f"undisturbed run: {duration_s:.1f} s; heartbeat time-out {options.timeout} s", flush=True
    )
    rights = [
        run_case(folder, fault, expected, timeout=options.timeout)
        for fault in faults(options, duration_s)
    ]
    if options.differences:
        differences = [*make_differences(folder)]
        rights += [
            run_case(folder, fault, expected, timeout=options.timeout) for fault in differences
        ]
        for fault in full_disk_cases():
            shutil.rmtree(folder / RUN, ignore_errors=True)
            with small_disk(folder / RUN) as is_mounted:
                rights += (
                    [run_case(folder, fault, expected, timeout=options.timeout)]
                    if is_mounted
                    else []
                )
    print(f"wrong: {rights.count(False)}")


def run_case(folder: Path, fault: Fault, expected: tuple[int, str], *, timeout: str) -> bool:
    """Run a job with a fault and start it again without. Print the row, and return whether the restart is exact.

    Args:
        folder: Folder of the recipe.
        fault: The fault.
        expected: State of the undisturbed run.
        timeout: Time-out of heartbeats in seconds.
    """
    if not (folder / RUN).is_mount():
        shutil.rmtree(folder / RUN, ignore_errors=True)
    settings = {"cluster.heartbeat_timeout": timeout, "cluster.start_timeout": START_TIMEOUT}
    outcome = run_job(folder, RUN, fault, settings=settings)
    (folder / RUN / FILLER).unlink(missing_ok=True)
    restart = run_job(folder, RUN, compiled=folder / COMPILED)
    is_right = restart.codes == (0, 0) and state_digest(folder / RUN) == expected
    print(row(fault, outcome, is_right), flush=True)
    return is_right


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", default="10")
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--differences", action="store_true")
    return parser.parse_args()


def faults(options: argparse.Namespace, duration_s: float) -> Iterator[Fault]:
    """Yield the named cases, then kills of a random process at random times of a run."""
    yield from CASES if options.cases else ()
    generator = random.Random(options.seed)
    for _ in range(options.random):
        victim, delay_s = generator.randrange(2), generator.uniform(0, duration_s)
        yield Fault(
            f"random: kill -9 of {victim} at {delay_s:.1f} s", "", victim, signal.SIGKILL, delay_s
        )


def row(fault: Fault, outcome: Outcome, is_right: bool) -> str:
    """Return a case as text: name, exit codes, seconds, restart, messages of the other process or of both."""
    shown = [1 - fault.victim] if fault.number else [0, 1]
    messages = [outcome.message(index) or " ".join(outcome.warnings(index)) for index in shown]
    text = "\n    ".join(
        re.sub(r"\s+", " ", message).strip()[:MAX_CHARS] for message in messages if message
    )
    codes = "/".join("suspended" if code is None else str(code) for code in outcome.codes)
    restart = "exact" if is_right else "WRONG"
    return f"{fault.name:<34} {codes:<14} {outcome.seconds:5.1f} s  restart {restart}  {text}"


if __name__ == "__main__":
    main()
