"""Measure the memory and time of `prep verify --chain` and `prep roundtrip`.

    python -m bench.provenance --work FOLDER [--model llama-7b] [--layers 4] [--memory 64MiB,512MiB]

The chain has three links: `pad-vocab`, `save-init` for a mesh, and `export`. The round trip takes the ways `mesh` and
`easylm`. The peak is anonymous memory minus the peak of `prep inspect` of the model, as `--memory` counts it.
FOLDER keeps the model and the chain for the next run, and needs room for six copies of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.evidence import log
from bench.meter import CommandCost, measure
from bench.models import write_model
from bench.published import PUBLISHED, override_config
from prepcli.core.tables import format_table

MODEL = "model"
# Command and output of each step. Its source is the output of the step before.
STEPS = (
    (("pad-vocab", "--multiple", "4096"), "padded"),
    (("save-init", "--mesh", "1,2,4"), "init"),
    (("export",), "exported"),
)
WAYS = ("mesh", "easylm")
HEADER = ("command", "--memory", "wall s", "CPU s", "MiB beyond inspect")
MIB = 1 << 20
SHARD_NBYTES = 10**9


def run_prep(work: Path, *words: str) -> CommandCost:
    """Run a prep command in the working folder. Raise SystemExit if it fails."""
    log(f"prep {' '.join(words)}")
    # The manifests record the names of the sources as they are typed here.
    with contextlib.chdir(work):
        cost = measure([sys.executable, "-m", "prepcli", *words, "--quiet"])
    if cost.exit_code:
        raise SystemExit(f"prep {words[0]}: {cost.stderr}")
    return cost


def make_chain(work: Path, model_name: str, layers: int) -> None:
    """Write the model and the outputs of the chain, unless they exist."""
    if not (work / MODEL).exists():
        config = override_config(PUBLISHED[model_name], layers=layers, dtype="bfloat16")
        write_model(work / MODEL, config, shard_nbytes=SHARD_NBYTES)
    source = MODEL
    for (command, *options), out in STEPS:
        if not (work / out).exists():
            run_prep(work, command, f"./{source}", *options, "--out", out)
        source = out


def measured_commands(memory: str) -> dict[str, list[str]]:
    """Return the measured commands with a memory limit, by their name in the table."""
    layouts = [word for way in WAYS for word in ("--layout", way)]
    out = f"certificate-{memory}.json"
    return {
        "verify --chain": ["verify", STEPS[-1][1], "--chain", "--memory", memory],
        "roundtrip": [
            *("roundtrip", f"./{MODEL}", *layouts),
            *("--out", out, "--overwrite", "--memory", memory),
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the chain, measure each command with each limit, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--model", choices=PUBLISHED, default="llama-7b", metavar="NAME")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", default="64MiB,512MiB", help="limits, with commas")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_chain(work, options.model, options.layers)
    nbytes = sum(path.stat().st_size for path in (work / MODEL).iterdir())
    base_nbytes = run_prep(work, "inspect", f"./{MODEL}").peak_nbytes
    rows: list[list[str]] = []
    for memory in options.memory.split(","):
        for name, command in measured_commands(memory).items():
            cost = run_prep(work, *command)
            beyond = (cost.peak_nbytes - base_nbytes) / MIB
            rows.append([name, memory, f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}", f"{beyond:.0f}"])
    print(f"{options.model}, {options.layers} layers, {nbytes / 1e9:.2f} GB in bfloat16")
    print(format_table(rows, HEADER, HEADER[2:]))


if __name__ == "__main__":
    main()
