"""Measure the parts of the time from `prep train` to the end of its first step.

    python -m bench.first_step --work FOLDER [--model gpt-neo-125M] [--layers 4] [--pairs 3]

Each pair is a start with an empty folder of compiled programs and one with the folder of the first. Both are new
processes, whose checkpoint and tokens are read from the page cache. Prints the median seconds of each part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.meter import wrap_function
from prepcli.core.compilation_cache import FOLDER_VARIABLE, use_compilation_cache

# The parts in their order, and the function of each. The rest of the time is between them.
PARTS = {
    "checkpoint opened": ("trainer.run.train", "open_start"),
    "checks": ("trainer.run.train", "check_start"),
    "tokens": ("trainer.run.train", "tokenize_data"),
    "state loaded": ("trainer.run.train", "load_state"),
    "step traced and compiled": ("trainer.training.loop", "Loop.compile"),
    "first step": ("trainer.run.train", "take_steps"),
}
RECIPE = """\
model.path = "{init}"
data = {{ path = "text.txt", seq_length = {length} }}
batch.size = {batch}
optimizer.lr = 1e-4
train.steps = 1
checkpoint.every = 0
"""


def timed(call: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return a function that adds the duration of each call to a part."""

    def run(*args: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start_s

    return run


def train_timed(words: list[str], start_s: float) -> dict[str, float]:
    """Run a command in this process, which began at the time `start_s`, and return the seconds of its parts."""
    # As the command does it before its first import of JAX
    use_compilation_cache(os.environ)
    from prepcli.commands.cli.main import main

    seconds: dict[str, float] = {}
    for part, (module, name) in PARTS.items():
        wrap_function(module, name, partial(timed, part=part, seconds=seconds))
    seconds["imports"] = time.time() - start_s
    if code := main(words):
        raise SystemExit(code)
    # A step contains the compilation of the loop's programs.
    seconds["first step"] -= seconds["step traced and compiled"]
    seconds["all"] = time.time() - start_s
    return seconds


def start(folder: Path, run: str) -> dict[str, float]:
    """Start a training in a new process, and return the seconds of its parts."""
    call = f"train_timed({words_of(run)!r}, {time.time()})"
    code = f"import json; from bench.first_step import train_timed; print(json.dumps({call}))"
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "caches")}
    environ.pop(FOLDER_VARIABLE, None)
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def words_of(run: str) -> list[str]:
    """Return the words of the command that trains one step."""
    return ["train", "recipe.toml", "--out", run, "--quiet"]


def prepare(
    folder: Path, model: str, *, length: int, batch: int, num_layers: int | None = None
) -> None:
    """Write a model of random values, its initial checkpoint, a text and a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(model).stem
    options: list[str] = []
    if num_layers is not None:
        name += f"-{num_layers}"
        options = ["--layers", str(num_layers)]
    init = f"init-{name}"
    vocabulary = ["the", "of", "and", "to", "in", "is", "that", "it"]
    text = " ".join(random.Random(0).choices(vocabulary, k=200_000))
    (folder / "text.txt").write_text(text)
    (folder / "recipe.toml").write_text(RECIPE.format(init=init, length=length, batch=batch))
    if (folder / init).exists():
        return
    hf_folder = str(folder / f"hf-{name}")
    subprocess.run([sys.executable, "-m", "bench.models", model, hf_folder, *options], check=True)
    words = ["save-init", hf_folder, "--out", str(folder / init), "--quiet"]
    subprocess.run([sys.executable, "-m", "prepcli", *words], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure pairs of starts, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the model and the runs")
    parser.add_argument("--model", default="gpt-neo-125M")
    parser.add_argument("--layers", type=int, help="layers of the model (default: all)")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    folder = options.work.absolute()
    prepare(
        folder,
        options.model,
        length=options.tokens,
        batch=options.batch,
        num_layers=options.layers,
    )
    rows: dict[str, list[dict[str, float]]] = {"compiled": [], "kept": []}
    for _ in range(options.pairs):
        shutil.rmtree(folder / "caches" / "prep", ignore_errors=True)
        for kind, starts in rows.items():
            starts.append(start(folder, f"run-{kind}"))
            shutil.rmtree(folder / f"run-{kind}")
    print(f"{'':26s}" + "".join(f"{kind:>10s}" for kind in rows))
    for part in rows["kept"][0]:
        medians = [
            statistics.median(row.get(part, 0.0) for row in starts) for starts in rows.values()
        ]
        print(f"{part:26s}" + "".join(f"{median:10.2f}" for median in medians))


if __name__ == "__main__":
    main()
