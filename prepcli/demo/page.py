"""Report of the demo: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prepcli.console.formatting import format_bytes, format_duration
from prepcli.demo.conversion import RESHARDED
from prepcli.demo.steps import StepReport
from prepcli.demo.svg import Bar, Curve, bar_chart, line_chart, shard_map_svg
from prepcli.demo.training import KILLED, SAVE_EVERY, STEPS, UNBROKEN
from prepcli.formats.manifest import read_manifest
from prepcli.inspection.html_page import write_html_page
from trainer.models.mesh import parse_mesh
from trainer.models.partition import device_boxes, partition_spec
from trainer.models.rules import PARAM_RULES
from trainer.training.metrics import METRICS_FILE, read_metrics

REPORT = "report.html"
SHOWN_LEAF = "embed.tokens"


def write_page(out: Path, steps: Sequence[StepReport]) -> None:
    """Write the report of a demo to the folder `out`. PrepError if the disk cannot be written."""
    write_html_page(out / REPORT, "prep demo", _body(out, steps))


def _body(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    yield "<h1>prep demo</h1>"
    yield (
        "<p>A tiny GPT-Neo with 257 words is padded, converted, resharded to eight devices, exported and trained. Two"
        f" runs are killed and resumed. All {len(steps)} steps passed.</p>"
    )
    yield from _steps_section(steps)
    yield from _loss_section(out, steps)
    yield from _devices_section(out)
    yield from _memory_section(steps)


def _steps_section(steps: Sequence[StepReport]) -> Iterator[str]:
    yield "<h2>Steps</h2><table><tr><th>step</th><th>result</th><th class=n>time</th><th class=n>bytes</th></tr>"
    for step in steps:
        command = f"<br><code>$ {escape(step.command)}</code>" if step.command else ""
        yield (
            f"<tr><td>{escape(step.step)}{command}</td><td>{escape(step.result)}</td>"
            f"<td class=n>{format_duration(step.seconds)}</td><td class=n>{format_bytes(step.bytes)}</td></tr>"
        )
    yield "</table>"


def _loss_section(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    curves = [
        Curve("undisturbed", _loss_points(out / UNBROKEN / METRICS_FILE), 7.0),
        Curve("killed and resumed", _loss_points(out / KILLED / METRICS_FILE)),
    ]
    save_marks = [(float(step), "saved") for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    kill_result = next((step.result for step in steps if step.step == "train, kill -9"), "")
    resume_result = next(
        (step.result for step in steps if step.step == "resume the same command" and "train" in step.command), ""
    )
    yield (
        "<h2>Training</h2><p>The loss by step. The second run: " + escape(f"{kill_result}; {resume_result}.") + "</p>"
    )
    yield line_chart(curves, save_marks, title="loss by step")


def _loss_points(path: Path) -> list[tuple[float, float]]:
    lines: list[dict[str, Any]] = read_metrics(path)
    return [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]


def _devices_section(out: Path) -> Iterator[str]:
    manifest = read_manifest(out / RESHARDED) or {}
    mesh, shape = parse_mesh(manifest["mesh"]), manifest["leaves"][f"params.{SHOWN_LEAF}"]["shape"]
    boxes = device_boxes(partition_spec([("vocab",), ("embed",)], shape, mesh, PARAM_RULES), mesh, shape)
    caption = f"{shape} on mesh {mesh}: the slices that each of {mesh.n_devices} devices holds."
    yield f"<h2>Devices</h2><p><code>{SHOWN_LEAF}</code> {caption}</p>"
    yield shard_map_svg(shape, boxes, title=f"{SHOWN_LEAF} on mesh {mesh}")


def _memory_section(steps: Sequence[StepReport]) -> Iterator[str]:
    bars = [Bar(step.step, step.peak, format_bytes(step.peak)) for step in steps if step.peak]
    yield "<h2>Memory</h2><p>Peak memory of each conversion above its start.</p>"
    yield bar_chart(bars, title="peak memory of each conversion")
