"""Measure seconds and memory of `prep save-init` for growing models, as a table and a chart.

    python -m bench.growth --work FOLDER [--model llama-7b] [--layers 2,8,16,32] [--svg docs/growth.svg]

The models are the named one with fewer or more layers. Each is measured with cold caches, alternating with cp, and
then deleted.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.evidence import BenchPaths, log, make_model, measure_case, remove
from bench.evidence_rows import EvidenceRow
from bench.published import PUBLISHED
from bench.svg_files import svg_file
from prepcli.commands.pages.charts import Curve, line_chart
from prepcli.core.tables import format_table

GB, MIB = 10**9, 1 << 20
CASE, MEMORY = "save-init", "512MiB"


def measure_growth(work: Path, name: str, layers: Sequence[int], pairs: int) -> list[EvidenceRow]:
    """Measure the model with each number of layers, in ascending order."""
    rows = []
    for num_layers in sorted(layers):
        paths = BenchPaths(make_model(work, name, num_layers), work)
        try:
            rows.append(measure_case(CASE, MEMORY, paths, pairs))
        finally:
            remove(paths.init, paths.out, *paths.unfinished)
            shutil.rmtree(paths.model)
        log(
            f"{num_layers} layers: {rows[-1].source_nbytes / GB:.1f} GB in {min(rows[-1].seconds):.1f} s"
        )
    return rows


def growth_text(rows: Sequence[EvidenceRow]) -> str:
    """Return a table of seconds, seconds per GB, ratios to cp and peak memory for each size."""
    header = "GB", "seconds", "s / GB", "cp, seconds", "/ fastest", "/ median", "peak MiB"
    lines = [
        (
            f"{row.source_nbytes / GB:.1f}",
            " ".join(f"{value:.1f}" for value in row.seconds),
            f"{min(row.seconds) / row.source_nbytes * GB:.2f}",
            " ".join(f"{value:.1f}" for value in row.cp_seconds),
            f"{row.to_fastest:.2f}",
            f"{row.to_median:.2f}",
            f"{row.peak_nbytes / MIB:.0f}",
        )
        for row in rows
    ]
    return format_table(lines, header, right_aligned=header)


def growth_svg(rows: Sequence[EvidenceRow]) -> str:
    """Return an SVG of two charts: seconds of the fastest runs over GB, and memory over GB."""
    seconds = []
    cp_seconds = []
    memory = []
    budget = []
    for row in rows:
        size = row.source_nbytes / GB
        seconds.append((size, min(row.seconds)))
        cp_seconds.append((size, min(row.cp_seconds)))
        memory.append((size, row.peak_nbytes / MIB))
        budget.append((size, 512.0))
    time_curves = [
        Curve(name="prep save-init, seconds", points=seconds),
        Curve(name="cp -r && sync, seconds", points=cp_seconds, color=1),
    ]
    memory_curves = [
        Curve(name="memory, MiB", points=memory),
        Curve(name="--memory, MiB", points=budget, color=1),
    ]
    return svg_file(
        line_chart(time_curves, "time by size", x_name="GB", y_name="seconds", from_zero=True),
        line_chart(memory_curves, "memory by size", x_name="GB", y_name="MiB", from_zero=True),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and draw the chart."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="folder on the disk to measure"
    )
    parser.add_argument(
        "--model", choices=PUBLISHED, default="llama-7b", metavar="NAME", help="alias of a model"
    )
    parser.add_argument(
        "--layers",
        default="1,6,16,32,64",
        metavar="N,…",
        help="layers of each model; default: 1,6,16,32,64",
    )
    parser.add_argument(
        "--pairs", type=int, default=2, metavar="N", help="runs of each; default: 2"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the chart to FILE")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    rows = measure_growth(
        options.work,
        options.model,
        [int(text) for text in options.layers.split(",")],
        options.pairs,
    )
    print(growth_text(rows))
    if options.svg:
        options.svg.write_text(growth_svg(rows))


if __name__ == "__main__":
    main()
