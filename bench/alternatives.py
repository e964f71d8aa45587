"""`prep save-init` against the usual ways to an Orbax checkpoint, on the same model, cold, in turn.

    python -m bench.alternatives --work FOLDER [--model gpt-neo-1.3B] [--flax PYTHON] [--pairs 3]

The usual ways: transformers loads the model in torch, its tensors become NumPy arrays, Orbax saves them; and, as redco
does it, transformers loads it into its Flax class, Orbax saves the parameters. The latter needs an environment of its
own: `--flax` names its Python (torch, transformers 4.55, flax, orbax-checkpoint).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.evidence import PREP, log, make_model, remove, run_checked
from bench.meter import CommandCost, drop_page_cache
from bench.published import PUBLISHED
from prepcli.console.ui import format_table

TORCH_SCRIPT = """
import sys
import orbax.checkpoint as ocp
from transformers import AutoModelForCausalLM
source, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
params = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
ocp.PyTreeCheckpointer().save(out, {"params": params})
"""
FLAX_SCRIPT = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import orbax.checkpoint as ocp
from transformers import FlaxAutoModelForCausalLM
source, out = sys.argv[1:]
model = FlaxAutoModelForCausalLM.from_pretrained(source, from_pt=True)
ocp.PyTreeCheckpointer().save(out, {"params": model.params})
"""
MIB = 1 << 20
SINGLE_FILE_NBYTES = 1 << 40  # bytes a file: Flax classes read safetensors only where they are one file


def conversion_commands(source: Path, out: Path, flax: Path | None) -> Mapping[str, Sequence[str | Path]]:
    """Name -> command."""
    found: dict[str, Sequence[str | Path]] = {
        "prep save-init": (PREP, "save-init", source, "--out", out, "--quiet"),
        "transformers, Orbax": (sys.executable, "-c", TORCH_SCRIPT, source, out),
    }
    return found | ({"redco: torch, Flax, Orbax": (flax, "-c", FLAX_SCRIPT, source, out)} if flax else {})


def usual_text(costs: Mapping[str, Sequence[CommandCost]]) -> str:
    """A line for each way: its runs, and its fastest and its memory as multiples of the first's."""
    first = next(iter(costs.values()))
    fastest, peak = min(cost.wall_s for cost in first), max(cost.peak_nbytes for cost in first)
    head = "way", "seconds", "median", "x time", "peak MiB", "x memory"
    shown = [
        (
            name,
            " ".join(f"{cost.wall_s:.1f}" for cost in found),
            f"{statistics.median(cost.wall_s for cost in found):.1f}",
            f"{min(cost.wall_s for cost in found) / fastest:.1f}",
            f"{max(cost.peak_nbytes for cost in found) / MIB:.0f}",
            f"{max(cost.peak_nbytes for cost in found) / peak:.1f}",
        )
        for name, found in costs.items()
    ]
    return format_table(shown, head, right_aligned=head[2:])


def measure_commands(source: Path, out: Path, flax: Path | None, pairs: int) -> dict[str, list[CommandCost]]:
    """Each way `pairs` times, in turn; outputs are deleted."""
    costs: dict[str, list[CommandCost]] = {}
    for turn in range(pairs):
        for name, words in conversion_commands(source, out, flax).items():
            drop_page_cache([source])
            costs.setdefault(name, []).append(run_checked(words))
            remove(out)
            log(f"{name}, {turn + 1}: {costs[name][-1].wall_s:.1f} s")
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for, and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.alternatives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="on the disk to measure")
    parser.add_argument("--model", choices=PUBLISHED, default="gpt-neo-1.3B", metavar="NAME", help="an alias")
    parser.add_argument("--layers", type=int, metavar="N", help="of a smaller model, to try this out")
    parser.add_argument("--flax", type=Path, metavar="PYTHON", help="of an environment with Flax classes")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="runs of each; default: 3")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    source = make_model(given.work, given.model, given.layers, SINGLE_FILE_NBYTES)
    print(usual_text(measure_commands(source, (given.work / "bench-out").absolute(), given.flax, given.pairs)))


if __name__ == "__main__":
    main()
