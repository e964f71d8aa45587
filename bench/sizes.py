"""Plan every published size of every family: `prep save-init --dry-run` of sparse models, with coverage checks.

    python -m bench.sizes --work FOLDER                       # the largest model of each family
    python -m bench.sizes --work FOLDER --all --mesh 1,8,1    # all aliases
    python -m bench.sizes --work FOLDER --run mistral-7b      # with values: converted, verified, deleted

Sparse models take no disk. `--run` takes twice the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.evidence import PREP, log, make_model, remove, run_checked
from bench.models import write_model
from bench.published import PUBLISHED, published_config
from prepcli.core.tables import format_table
from prepcli.sources.aliases import ALIASES, ALIASES_BY_NAME

GB, MIB = 10**9, 1 << 20


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Results of a planned or converted model: seconds of the process, peak memory above `prep inspect`."""

    name: str
    nbytes: int
    tensors: int
    leaves: int
    chunks: int
    seconds: float
    peak_nbytes: int


def largest_aliases() -> list[str]:
    """Return the alias with the most parameters of each family."""
    by_size = sorted(ALIASES, key=lambda alias: alias.parameters)
    return sorted(
        {alias.family: alias.name for alias in by_size}.values(), key=list(PUBLISHED).index
    )


def plan_model(work: Path, name: str, options: Sequence[str]) -> SizeRow:
    """Plan the conversion of a sparse model. Raise SystemExit if prep fails."""
    model = work / f"bench-{name}-sparse"
    remove(model)
    write_model(model, published_config(name), sparse=True)
    try:
        return _save_init(name, model, work / "bench-out", (*options, "--dry-run"))
    finally:
        remove(model)


def convert_model(work: Path, name: str, options: Sequence[str]) -> SizeRow:
    """Convert a model with values, verify the checkpoint, and delete both."""
    out, unfinished = work / "bench-out", work / "bench-out.partial"
    remove(out, unfinished)
    model = make_model(work, name, None)
    try:
        row = _save_init(name, model, out, options)
        run_checked((PREP, "verify", out, model, "--quiet"))
        return row
    finally:
        remove(model, out, unfinished)


def _save_init(name: str, model: Path, out: Path, options: Sequence[str]) -> SizeRow:
    inspect_cost = run_checked((PREP, "inspect", model, "--quiet"))
    cost = run_checked((PREP, "save-init", model, "--out", out, *options, "--json", "--quiet"))
    result = json.loads(cost.stdout)
    if result["accounting"]["used"] != result["accounting"]["tensors"]:
        raise SystemExit(f"{name}: {result['accounting']}")
    return SizeRow(
        name=name,
        nbytes=result["source"]["bytes"],
        tensors=result["accounting"]["tensors"],
        leaves=result["leaves"],
        chunks=result["chunks"],
        seconds=cost.wall_s,
        peak_nbytes=max(cost.peak_nbytes - inspect_cost.peak_nbytes, 0),
    )


def sizes_text(rows: Sequence[SizeRow]) -> str:
    """Return a table with one line per model."""
    header = (
        "model",
        "family",
        "parameters",
        "GB",
        "tensors",
        "leaves",
        "chunks",
        "seconds",
        "peak MiB",
    )
    lines = [
        (
            row.name,
            ALIASES_BY_NAME[row.name].family,
            f"{ALIASES_BY_NAME[row.name].parameters:,}",
            f"{row.nbytes / GB:.1f}",
            f"{row.tensors:,}",
            f"{row.leaves:,}",
            f"{row.chunks:,}",
            f"{row.seconds:.1f}",
            f"{row.peak_nbytes / MIB:.0f}",
        )
        for row in rows
    ]
    return format_table(lines, header, right_aligned=header[2:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan or convert the requested models and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sizes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="aliases; default: the largest of each family"
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="folder on the disk to measure"
    )
    parser.add_argument("--all", action="store_true", help="measure all aliases")
    parser.add_argument("--run", action="store_true", help="convert and verify models with values")
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="default: 512MiB")
    parser.add_argument("--mesh", metavar="MESH", help="default: none")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in PUBLISHED]:
        parser.error(f"no alias {unknown[0]}; `prep models` lists them")
    options.work.mkdir(parents=True, exist_ok=True)
    prep_options = (
        "--memory",
        options.memory,
        *(("--mesh", options.mesh, "--pad-vocab", "auto") if options.mesh else ()),
    )
    rows = []
    try:
        for name in list(PUBLISHED) if options.all else options.names or largest_aliases():
            rows.append(
                (convert_model if options.run else plan_model)(options.work, name, prep_options)
            )
            log(f"{name}: {rows[-1].nbytes / GB:.1f} GB in {rows[-1].seconds:.1f} s")
    finally:  # print the completed measurements if one fails
        print(sizes_text(rows))


if __name__ == "__main__":
    main()
