"""Compare `prep save-init` with other ways to write an Orbax checkpoint of a model, cold, in alternating order.

    python -m bench.alternatives --work FOLDER [--model gpt-neo-1.3B] [--flax PYTHON] [--pairs 3]

There are two other ways. In the first one, transformers loads the model in torch, its tensors become NumPy arrays, and
Orbax saves them. In the second one, as in redco, transformers loads the model into its Flax class, and Orbax saves the
parameters. The second one needs a separate environment: `--flax` is the path of its Python (with torch, transformers
4.55, flax, orbax-checkpoint).
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
from prepcli.core.tables import format_table

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
# Size limit of a file. Flax classes read safetensors only from one file.
SINGLE_FILE_NBYTES = 1 << 40


def conversion_commands(
    source: Path, out: Path, flax: Path | None
) -> Mapping[str, Sequence[str | Path]]:
    """Return the command of each way by name."""
    commands: dict[str, Sequence[str | Path]] = {
        "prep save-init": (PREP, "save-init", source, "--out", out, "--quiet"),
        "transformers, Orbax": (sys.executable, "-c", TORCH_SCRIPT, source, out),
    }
    return commands | (
        {"redco: torch, Flax, Orbax": (flax, "-c", FLAX_SCRIPT, source, out)} if flax else {}
    )


def usual_text(costs: Mapping[str, Sequence[CommandCost]]) -> str:
    """Return a table with one line per way: its runs, and its best time and memory relative to the first way."""
    first = next(iter(costs.values()))
    fastest, peak = min(cost.wall_s for cost in first), max(cost.peak_nbytes for cost in first)
    header = "way", "seconds", "median", "x time", "peak MiB", "x memory"
    lines = [
        (
            name,
            " ".join(f"{cost.wall_s:.1f}" for cost in way_costs),
            f"{statistics.median(cost.wall_s for cost in way_costs):.1f}",
            f"{min(cost.wall_s for cost in way_costs) / fastest:.1f}",
            f"{max(cost.peak_nbytes for cost in way_costs) / MIB:.0f}",
            f"{max(cost.peak_nbytes for cost in way_costs) / peak:.1f}",
        )
        for name, way_costs in costs.items()
    ]
    return format_table(lines, header, right_aligned=header[2:])


def measure_commands(
    source: Path, out: Path, flax: Path | None, pairs: int
) -> dict[str, list[CommandCost]]:
    """Run each way `pairs` times, in alternating order. Outputs are deleted."""
    costs: dict[str, list[CommandCost]] = {}
    for turn in range(pairs):
        for name, words in conversion_commands(source, out, flax).items():
            drop_page_cache([source])
            costs.setdefault(name, []).append(run_checked(words))
            remove(out)
            log(f"{name}, {turn + 1}: {costs[name][-1].wall_s:.1f} s")
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all ways and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.alternatives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="folder on the disk to measure"
    )
    parser.add_argument(
        "--model",
        choices=PUBLISHED,
        default="gpt-neo-1.3B",
        metavar="NAME",
        help="alias of a model",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="number of layers, for a smaller model"
    )
    parser.add_argument(
        "--flax", type=Path, metavar="PYTHON", help="Python of an environment with Flax classes"
    )
    parser.add_argument(
        "--pairs", type=int, default=3, metavar="N", help="runs of each; default: 3"
    )
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    source = make_model(options.work, options.model, options.layers, SINGLE_FILE_NBYTES)
    print(
        usual_text(
            measure_commands(
                source, (options.work / "bench-out").absolute(), options.flax, options.pairs
            )
        )
    )


if __name__ == "__main__":
    main()
