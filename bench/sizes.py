"""Every family at its published sizes: `prep save-init --dry-run` of sparse models, planned and coverage-checked.

    python -m bench.sizes --work FOLDER                       # of each family the largest one
    python -m bench.sizes --work FOLDER --all --mesh 1,8,1    # all that there are aliases for
    python -m bench.sizes --work FOLDER --run mistral-7b      # whole, with values: written, verified, deleted

Sparse models take no disk; `--run` takes twice the model.
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
from prepcli.console.ui import format_table
from prepcli.sources.aliases import ALIASES, ALIASES_BY_NAME

GB, MIB = 10**9, 1 << 20


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A model as planned, or as converted: seconds of the whole process, memory above that of `prep inspect`."""

    name: str
    nbytes: int
    tensors: int
    leaves: int
    chunks: int
    seconds: float
    peak_nbytes: int


def largest_aliases() -> list[str]:
    """Of each family the alias with the most parameters."""
    by_size = sorted(ALIASES, key=lambda alias: alias.parameters)
    return sorted({alias.family: alias.name for alias in by_size}.values(), key=list(PUBLISHED).index)


def plan_model(work: Path, name: str, options: Sequence[str]) -> SizeRow:
    """Plan the conversion of a model of headers and zeros. SystemExit with what prep says where that fails."""
    model = work / f"bench-{name}-sparse"
    remove(model)
    write_model(model, published_config(name), sparse=True)
    try:
        return _save_init(name, model, work / "bench-out", (*options, "--dry-run"))
    finally:
        remove(model)


def convert_model(work: Path, name: str, options: Sequence[str]) -> SizeRow:
    """Convert a model with values and hold the checkpoint against it; nothing is left of either."""
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
    base = run_checked((PREP, "inspect", model, "--quiet"))
    cost = run_checked((PREP, "save-init", model, "--out", out, *options, "--json", "--quiet"))
    said = json.loads(cost.stdout)
    if said["accounting"]["used"] != said["accounting"]["tensors"]:
        raise SystemExit(f"{name}: {said['accounting']}")
    return SizeRow(
        name,
        said["source"]["bytes"],
        said["accounting"]["tensors"],
        said["leaves"],
        said["chunks"],
        cost.wall_s,
        max(cost.peak_nbytes - base.peak_nbytes, 0),
    )


def sizes_text(rows: Sequence[SizeRow]) -> str:
    """A line for each model."""
    head = "model", "family", "parameters", "GB", "tensors", "leaves", "chunks", "seconds", "peak MiB"
    shown = [
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
    return format_table(shown, head, right_aligned=head[2:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, or convert, what the arguments ask for; print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sizes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="aliases; default: the largest one of each family")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="on the disk to measure")
    parser.add_argument("--all", action="store_true", help="of all aliases")
    parser.add_argument("--run", action="store_true", help="models with values, converted and verified")
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="default: 512MiB")
    parser.add_argument("--mesh", metavar="MESH", help="default: none")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in PUBLISHED]:
        parser.error(f"no alias {unknown[0]}; `prep models` lists them")
    given.work.mkdir(parents=True, exist_ok=True)
    options = ("--memory", given.memory, *(("--mesh", given.mesh, "--pad-vocab", "auto") if given.mesh else ()))
    rows = []
    try:
        for name in list(PUBLISHED) if given.all else given.names or largest_aliases():
            rows.append((convert_model if given.run else plan_model)(given.work, name, options))
            log(f"{name}: {rows[-1].nbytes / GB:.1f} GB in {rows[-1].seconds:.1f} s")
    finally:  # what was measured is shown even where the next one fails
        print(sizes_text(rows))


if __name__ == "__main__":
    main()
