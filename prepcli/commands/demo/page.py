"""Report of the demo: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from prepcli.commands.demo.conversion import RESHARDED
from prepcli.commands.demo.steps import StepReport
from prepcli.commands.demo.training import KILLED, SAVE_EVERY, STEPS, UNBROKEN
from prepcli.commands.pages.charts import Bar, Curve, bar_chart, line_chart, shard_map_svg
from prepcli.commands.pages.html_page import write_html_page
from prepcli.core.formatting import format_bytes, format_duration
from prepcli.formats.manifest import read_manifest
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import device_boxes, partition_spec
from prepcli.models.rules import PARAM_RULES
from trainer.training.metrics import METRICS_FILE, line_step, read_metrics

REPORT = "report.html"
SHOWN_LEAF = "embed.tokens"


def write_page(out: Path, steps: Sequence[StepReport]) -> None:
    """Write the report of a demo to the folder `out`. Raise PrepError if the disk cannot be written."""
    write_html_page(out / REPORT, "prep demo", _page_body(out, steps))


def _page_body(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    yield "<h1>prep demo</h1>"
    yield (
        "<p>A tiny GPT-Neo with 257 words is padded, converted, resharded to eight devices,"
        " exported and trained. Two runs are killed and resumed."
        f" All {len(steps)} steps passed.</p>"
    )
    yield from _steps_section(steps)
    yield from _loss_section(out, steps)
    yield from _devices_section(out)
    yield from _memory_section(steps)


def _steps_section(steps: Sequence[StepReport]) -> Iterator[str]:
    yield "<h2>Steps</h2><table><tr><th>step</th><th>result</th>"
    yield "<th class=n>time</th><th class=n>bytes</th></tr>"
    for step in steps:
        command = ""
        if step.command:
            command = f"<br><code>$ {escape(step.command)}</code>"
        yield f"<tr><td>{escape(step.step)}{command}</td><td>{escape(step.result)}</td>"
        yield f"<td class=n>{format_duration(step.seconds)}</td>"
        yield f"<td class=n>{format_bytes(step.bytes)}</td></tr>"
    yield "</table>"


def _loss_section(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    """Yield the losses of both runs. The narrow curve of the killed run lies on the wide curve of the other run."""
    unbroken = _loss_points(out / UNBROKEN / METRICS_FILE)
    killed = _loss_points(out / KILLED / METRICS_FILE)
    curves = [
        Curve(name="undisturbed", points=unbroken, width=7.0),
        Curve(name="killed and resumed", points=killed, color=1, width=2.0),
    ]
    save_marks = [(float(step), "saved") for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    kill_result = ""
    resume_result = ""
    for step in steps:
        if step.step == "train, kill -9":
            kill_result = step.result
        # The conversion has a step of the same name.
        elif step.step == "resume the same command" and "train" in step.command:
            resume_result = step.result
    results = escape(f"{kill_result}; {resume_result}.")
    yield f"<h2>Training</h2><p>The loss by step. The second run: {results}</p>"
    yield line_chart(curves, "loss by step", x_name="step", marks=save_marks)


def _loss_points(path: Path) -> list[tuple[float, float]]:
    """Return step and loss of each line of the metrics with a loss."""
    points: list[tuple[float, float]] = []
    for line in read_metrics(path):
        loss = line.get("loss")
        if isinstance(loss, float):
            points.append((line_step(line), loss))
    return points


def _devices_section(out: Path) -> Iterator[str]:
    """Yield the shards of one leaf on the devices of the resharded checkpoint."""
    manifest = read_manifest(out / RESHARDED)
    assert manifest is not None
    assert manifest.mesh is not None
    assert manifest.leaves is not None
    mesh = parse_mesh(manifest.mesh)
    shape = manifest.leaves[f"params.{SHOWN_LEAF}"]["shape"]
    # The axes of embed.tokens are [vocab, embed]. With mesh 1,2,4 the rules split vocab by mp and embed by fsdp.
    spec = partition_spec([("vocab",), ("embed",)], shape, mesh, PARAM_RULES)
    caption = f"{shape} on mesh {mesh}: the slices that each of {mesh.n_devices} devices holds."
    yield f"<h2>Devices</h2><p><code>{SHOWN_LEAF}</code> {caption}</p>"
    yield shard_map_svg(shape, device_boxes(spec, mesh, shape), f"{SHOWN_LEAF} on mesh {mesh}")


def _memory_section(steps: Sequence[StepReport]) -> Iterator[str]:
    bars = [Bar(step.step, step.peak, format_bytes(step.peak)) for step in steps if step.peak]
    yield "<h2>Memory</h2><p>Peak memory of each conversion above its start.</p>"
    yield bar_chart(bars, "peak memory of each conversion")
