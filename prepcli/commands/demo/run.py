"""Run the steps of the demo, one after another, and write its report."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from prepcli.commands.demo.steps import (
    KILLED_RUN,
    OUTPUTS,
    UNBROKEN_RUN,
    CommandError,
    DemoStep,
    demo_steps,
    logged_losses,
    remove_output,
)
from prepcli.commands.demo.tiny_model import RESHARDED, SAVE_EVERY, STEPS
from prepcli.commands.pages.charts import Bar, Curve, bar_chart, line_chart, shard_map_svg
from prepcli.commands.pages.html_page import write_html_page
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes, format_duration
from prepcli.core.observer import Observer
from prepcli.core.pacing import PacedNotes, ticking
from prepcli.execution.output_paths import check_local_path
from prepcli.formats.manifest import read_manifest
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import device_boxes, partition_spec
from prepcli.models.rules import PARAM_RULES

MARKER = ".made-by-prep-demo"
REPORT = "report.html"
SHOWN_LEAF = "embed.tokens"
# The largest single file of the demo has 25 MB. A write that fails leaves less than that.
MIN_FREE_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a finished step, as printed with `--json`.

    Attributes:
        step: Title of the step.
        command: The command as a user would type it in the demo's folder, empty if there is none.
        seconds: Duration.
        bytes: Bytes written.
        peak: Peak memory in bytes, or 0 if the command does not report it.
        result: Line with the result, or the error.
        ok: Whether the step succeeded.
        hint: Command to type after a failure.
    """

    step: str
    command: str
    seconds: float = 0.0
    bytes: int = 0
    peak: int = 0
    result: str = ""
    ok: bool = False
    hint: str = ""

    @property
    def result_text(self) -> str:
        """The result, marked if the step failed."""
        return self.result if self.ok else f"FAILED: {self.result}"


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The steps of a demo that ran, up to the first one that failed.

    Attributes:
        out: Folder of the demo.
        steps: Report of each step.
        num_planned: Number of steps of the whole demo.
    """

    out: Path
    steps: tuple[StepReport, ...]
    num_planned: int

    @property
    def failed_step(self) -> StepReport | None:
        """The step that ended the demo, or None if all passed."""
        last = self.steps[-1]
        return None if last.ok else last


def run_demo(out: Path, observer: Observer, steps: Sequence[DemoStep] | None = None) -> DemoRun:
    """Make a tiny model in the folder `out`, convert it in both directions, train it, and check each step.

    Args:
        out: New or empty folder, or the folder of an earlier demo. Its outputs are replaced.
        observer: Receives a note before and after each step.
        steps: Some of the steps, without a page. None means all.

    Returns:
        The reports of the steps, up to the first one that failed. If all passed, a page with pictures was written.

    Raises:
        PrepError: `out` exists and was not made by a demo, or cannot be created.
    """
    check_local_path(out)
    _prepare_folder(out)
    planned = demo_steps() if steps is None else steps
    count = len(planned)
    observer.note(f"offline, {count} steps; to repeat a step: cd {shlex.quote(str(out))}")
    reports: list[StepReport] = []
    for number, step in enumerate(planned, 1):
        observer.note(f"[{number}/{count}] {step.title}")
        report = _run_step(step, out, observer)
        observer.note(f"      {report.result_text} ({format_duration(report.seconds)})")
        reports.append(report)
        if not report.ok:
            break
    run = DemoRun(out, tuple(reports), count)
    if steps is None and run.failed_step is None:
        write_html_page(out / REPORT, "prep demo", _page_body(out, run.steps))
    return run


def _prepare_folder(out: Path) -> None:
    """Create the demo's folder, or delete the outputs of an earlier demo from it.

    Raises:
        PrepError: The folder was not made by a demo, or cannot be created.
    """
    # Only a folder with the marker loses files, so a folder of the user with the same name stays as it is.
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        why = f"it has no {MARKER}"
        what = f"{out} already exists and is not a demo's folder"
        raise usage_error(what, why, _demo_command("NAME"))
    for name in (*OUTPUTS, REPORT):
        remove_output(out / name)
    try:
        # A kill between the two lines leaves an empty folder, which the next demo accepts.
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        why = error.strerror or str(error)
        raise PrepError(f"cannot create {out}", why, _demo_command("NAME")) from error


def _demo_command(folder: str) -> str:
    return text("{}", Command("demo", Option("out", folder)))


def _run_step(step: DemoStep, folder: Path, observer: Observer) -> StepReport:
    """Run a step, and note its command and its progress."""
    command = ""
    if step.args:
        variables = [f"{name}={value}" for name, value in step.env.items()]
        command = shlex.join([*variables, "prep", *step.args])
        observer.note(f"      $ {command}")
    start_s = time.monotonic()
    report = StepReport(step.title, command)
    try:
        with _signs_of_life(step, folder, observer):
            outcome = step.run(folder, step)
        report = replace(
            report, result=outcome.result, bytes=outcome.nbytes, peak=outcome.peak_nbytes, ok=True
        )
    except (OSError, PrepError) as error:
        result, hint = _failure_texts(error, command, folder)
        report = replace(report, result=result, hint=hint)
    return replace(report, seconds=round(time.monotonic() - start_s, 3))


@contextmanager
def _signs_of_life(step: DemoStep, out: Path, observer: Observer) -> Iterator[None]:
    """Note the progress of a step that takes long."""
    start_s = time.monotonic()
    notes = PacedNotes(observer)

    def describe() -> str:
        line = f"      {format_duration(time.monotonic() - start_s)}"
        if not step.training_run:
            return line
        return f"{line}, {len(logged_losses(out / step.training_run))} of {STEPS} steps"

    with ticking(lambda: notes.note_if_due(describe)):
        yield


def _failure_texts(error: OSError | PrepError, command: str, folder: Path) -> tuple[str, str]:
    """Return what failed in a step, and the command to type."""
    # The message of a killed or crashed process may lack the name of the disk that was full.
    for path in (folder, Path(os.environ.get("TMPDIR") or "/tmp")):
        if _is_disk_full(path):
            result = f"the disk that holds {path} is full - {error}"
            return result, "free some space, and try again"
    if isinstance(error, CommandError):
        return str(error), f"`cd {shlex.quote(str(folder))} && {command}`"
    if isinstance(error, PrepError):
        # The command succeeded, and its outputs exist now: alone it would do something else.
        return str(error), _demo_command(str(folder))
    what = f"cannot read or write {error.filename or folder} - {error.strerror or error}"
    return f"{what} - check the permissions of the folder", _demo_command(str(folder))


def _is_disk_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < MIN_FREE_NBYTES
    except OSError:
        return False


def _page_body(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    """Yield the parts of the report: a self-contained page with pictures."""
    yield "<h1>prep demo</h1>"
    yield (
        "<p>A tiny GPT-Neo with 257 words is padded, converted, resharded to eight devices,"
        " exported and trained. Two runs are killed and resumed."
        f" All {len(steps)} steps passed.</p>"
    )
    yield "<h2>Steps</h2><table><tr><th>step</th><th>result</th>"
    yield "<th class=n>time</th><th class=n>bytes</th></tr>"
    for step in steps:
        command = f"<br><code>$ {escape(step.command)}</code>" if step.command else ""
        yield f"<tr><td>{escape(step.step)}{command}</td><td>{escape(step.result)}</td>"
        yield f"<td class=n>{format_duration(step.seconds)}</td>"
        yield f"<td class=n>{format_bytes(step.bytes)}</td></tr>"
    yield "</table>"
    yield from _loss_section(out, steps)
    yield from _devices_section(out)
    bars = [Bar(step.step, step.peak, format_bytes(step.peak)) for step in steps if step.peak]
    yield "<h2>Memory</h2><p>Peak memory of each conversion above its start.</p>"
    yield bar_chart(bars, "peak memory of each conversion")


def _loss_section(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    """Yield the losses of both runs. The narrow curve of the killed run lies on the wide curve of the other run."""
    unbroken = logged_losses(out / UNBROKEN_RUN)
    killed = logged_losses(out / KILLED_RUN)
    curves = [
        Curve(name="undisturbed", points=unbroken, width=7.0),
        Curve(name="killed and resumed", points=killed, color=1, width=2.0),
    ]
    save_marks = [(float(step), "saved") for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    # The results of the kill and of the resumption.
    results = [step.result for step in steps if step.command.endswith(f"--out {KILLED_RUN}")]
    yield f"<h2>Training</h2><p>The loss by step. The second run: {escape('; '.join(results))}.</p>"
    yield line_chart(curves, "loss by step", x_name="step", marks=save_marks)


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
