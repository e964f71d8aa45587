"""Time and peak memory of `prep report` on long runs.

    python -m bench.run_report --work FOLDER --lines 1000000 10000000

Each size is measured in a process of its own. The metrics are deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from prepcli.commands.operations.report import PAGE
from prepcli.formats.manifest import RECIPE_FILE
from trainer.training.metrics import METRICS_FILE

EVAL_EVERY = 100
BLOCK_LINES = 10_000


def main() -> None:
    """Measure each size, and print a line of JSON for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--lines", type=int, nargs="+", default=[1_000_000, 10_000_000])
    args = parser.parse_args()
    for num_lines in args.lines:
        run = args.work / f"run-{num_lines}"
        nbytes = write_run(run, num_lines)
        print(
            json.dumps({"lines": num_lines, "metrics_bytes": nbytes, **measure_report(run)}),
            flush=True,
        )
        shutil.rmtree(run)


def write_run(folder: Path, num_lines: int) -> int:
    """Write a run with a line per step and an evaluation every EVAL_EVERY steps. Return the size of its metrics."""
    folder.mkdir(parents=True)
    (folder / RECIPE_FILE).write_text('name = "run"\n')
    random = np.random.default_rng(0)
    with (folder / METRICS_FILE).open("w") as file:
        for low in range(0, num_lines, BLOCK_LINES):
            noise = random.random(BLOCK_LINES).tolist()
            for step, value in enumerate(noise[: num_lines - low], low + 1):
                file.write(json.dumps(_line(step, value)) + "\n")
        return file.tell()


def _line(step: int, noise: float) -> dict[str, float | None]:
    if step % EVAL_EVERY == 0:
        return {
            "step": step,
            "eval_loss": 3 + noise,
            "eval_perplexity": 20 + noise,
            "eval_tokens": 65536,
        }
    return {
        "step": step,
        "loss": 3 + noise,
        "accuracy": noise,
        "grad_norm": 1 + noise,
        "lr": 3e-4 * noise,
        "tokens": 524288 * step,
        "skipped": 0,
        "seconds": round(1 + noise, 4),
        "tokens_per_s": round(524288 / (1 + noise), 1),
        "mfu": round(0.4 + noise / 10, 4),
    }


def measure_report(run: Path) -> dict[str, float]:
    """Run `prep report` in a process of its own, and return its seconds, peak memory and the size of the page."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "prepcli", "report", str(run), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started_s
    if status:
        raise SystemExit(f"prep report ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": usage.ru_maxrss * 1024 // 10**6,
        "page_bytes": (run / PAGE).stat().st_size,
    }


if __name__ == "__main__":
    main()
