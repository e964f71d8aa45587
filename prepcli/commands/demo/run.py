"""The demo: the commands that a user types on a tiny model, checks of their results, and a page with pictures."""

from __future__ import annotations

import filecmp
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from prepcli.commands.console.ui import Report
from prepcli.commands.demo.tiny_model import (
    RECIPE_TEXT,
    RESHARDED,
    SAVE_EVERY,
    SENTENCE_WORDS,
    SENTENCES,
    STEPS,
    TEXT,
    TEXT_WORDS,
    VOCABULARY,
    learnable_text,
    write_tiny_model,
)
from prepcli.commands.pages.charts import Curve, line_chart, shard_map_svg
from prepcli.commands.pages.html_page import (
    Bar,
    Markup,
    bar_table,
    html_table,
    legend,
    write_html_page,
)
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes, format_duration
from prepcli.core.observer import Observer, PacedNotes, ticking
from prepcli.core.tables import Table
from prepcli.formats.manifest import read_manifest, saved_steps, step_folder
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import device_boxes, partition_spec
from prepcli.models.rules import PARAM_RULES
from prepcli.stores.addresses import check_local_path
from prepcli.stores.files import write_file
from trainer.training.metrics import METRICS_FILE, line_step, read_metrics

MARKER = ".made-by-prep-demo"
REPORT = "report.html"
MODEL = "tiny"
PADDED = "tiny-padded"
INIT = "tiny-padded-init"
UNBROKEN = "unbroken"
EXPORTED = "tiny-hf"
RECIPE = "tiny.toml"
UNBROKEN_RUN = "runs/unbroken"
KILLED_RUN = "runs/tiny"
LEARNED = "tiny-learned"
OUTPUTS = (
    *(MODEL, PADDED, INIT, UNBROKEN, RESHARDED, EXPORTED),
    *(TEXT, RECIPE, "runs", LEARNED, REPORT),
)
# A small budget yields many small steps, and so many moments for a kill.
SAVE_INIT = ("save-init", PADDED, "--mesh", "1,1,1", "--memory", "32MiB")
# In the demo's folder. Three steps train the same model. With the cache only the first one compiles it.
JAX_CACHE = ".jax-cache"
SHOWN_LEAF = "embed.tokens"
# The largest single file of the demo has 25 MB. A write that fails leaves less than that.
MIN_FREE_NBYTES = 32 << 20
POLL_EVERY_S = 0.0005
# The command may end before it is killed.
MAX_KILL_TRIES = 5
# A conversion is killed when this part of its output is written.
KILLED_SHARE = 0.6
LAST_KILLED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class DemoStep:
    """A step of the demo.

    Attributes:
        title: Title for the user.
        args: Arguments of the command, empty if the step runs none.
        run: Called with the demo's folder and the step. Raises PrepError if the step fails.
        training_run: Folder of the run of the command on 8 devices. Its steps take long.
    """

    title: str
    args: tuple[str, ...]
    run: Callable[[Path, DemoStep], StepReport]
    training_run: str = ""

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables of the command."""
        return {"JAX_NUM_CPU_DEVICES": "8"} if self.training_run else {}

    @property
    def command(self) -> str:
        """The command as a user would type it in the demo's folder, empty if there is none."""
        variables = [f"{name}={value}" for name, value in self.env.items()]
        return shlex.join([*variables, "prep", *self.args]) if self.args else ""

    def passed(self, result: str, nbytes: int, peak_nbytes: int = 0) -> StepReport:
        """Return the report of the step with its result, the bytes written, and the peak memory."""
        report = StepReport(self.title, self.command, bytes=nbytes, peak=peak_nbytes)
        return replace(report, result=result, ok=True)


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

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the printed table."""
        peak = format_bytes(self.peak) if self.peak else "-"
        return (self.step, f"{self.seconds:.1f}", format_bytes(self.bytes), peak, self.result_text)


def demo_steps() -> tuple[DemoStep, ...]:
    """Return the steps from a model with an odd vocabulary to eight devices and back, and a training there."""
    pad = _conversion("{vocab[true]} -> {vocab[padded]} rows", true=257, padded=264)
    reshard = _conversion("{mesh[from]} -> {mesh[to]}, {chunks} chunks")
    export = _conversion("{vocab[written]} true rows", written=257)
    export_learned = _conversion("{vocab[written]} rows, ready for transformers", written=257)
    train = ("train", RECIPE, "--out")
    learned = ("export", KILLED_RUN, "--out", LEARNED)
    return (
        DemoStep("make a tiny GPT-Neo", (), _make_model),
        DemoStep("pad its vocabulary", ("pad-vocab", MODEL, "--multiple", "8"), pad),
        DemoStep("save an init, kill -9", SAVE_INIT, _kill_conversion),
        DemoStep("resume the same command", SAVE_INIT, _resume_conversion),
        DemoStep("convert without a kill", (*SAVE_INIT, "--out", UNBROKEN), _compare_outputs),
        DemoStep("reshard to 8 devices", ("reshard", INIT, "--mesh", "1,2,4"), reshard),
        DemoStep("export to Hugging Face", ("export", RESHARDED), export),
        DemoStep("verify against the start", ("verify", EXPORTED, MODEL, "--strict"), _verify),
        DemoStep("write a text and a recipe", (), _write_text_and_recipe),
        DemoStep("train on 8 devices", (*train, UNBROKEN_RUN), _train, UNBROKEN_RUN),
        DemoStep("train, kill -9", (*train, KILLED_RUN), _kill_training, KILLED_RUN),
        DemoStep("resume the same command", (*train, KILLED_RUN), _resume_training, KILLED_RUN),
        DemoStep("export the trained model", learned, export_learned),
        DemoStep("verify against the run", ("verify", LEARNED, KILLED_RUN), _verify),
    )


def _make_model(folder: Path, step: DemoStep) -> StepReport:
    nbytes = write_tiny_model(folder / MODEL)
    num_files = len([*(folder / MODEL).glob("*.safetensors")])
    return step.passed(f"{len(VOCABULARY)} words, {num_files} files", nbytes)


def _conversion(shows: str, **vocab: int) -> Callable[[Path, DemoStep], StepReport]:
    """Return a step that runs its command. `shows` has fields of the report, which must have the sizes in `vocab`."""

    def convert(folder: Path, step: DemoStep) -> StepReport:
        report = run_prep(folder, step)
        is_expected = vocab.items() <= report.get("vocab", {}).items()
        _check(is_expected, f"the vocabulary became {report.get('vocab')}")
        return _converted(step, report, shows.format_map(report))

    return convert


def _kill_conversion(folder: Path, step: DemoStep) -> StepReport:
    """Kill the command while the output is partly written."""
    total = sum(path.stat().st_size for path in (folder / PADDED).glob("*.safetensors"))
    partial = _partial(folder / INIT)
    written = 0

    def should_kill(pid: int) -> bool:
        nonlocal written
        # Its files have their whole sizes from the start. The kernel counts what the process writes.
        counters = Path(f"/proc/{pid}/io").read_text()
        written = int(counters.partition("wchar:")[2].split()[0])
        share = LAST_KILLED_SHARE if tries == MAX_KILL_TRIES else KILLED_SHARE
        return written > share * total and partial.exists()

    for tries in range(1, MAX_KILL_TRIES + 1):
        _remove_output(folder / INIT)
        if not run_prep(folder, step, should_kill) and partial.exists():
            result = f"killed at {written / total:.0%}; no {INIT}{_tries_note(tries)}"
            return step.passed(result, written)
    raise _not_killed_error()


def _resume_conversion(folder: Path, step: DemoStep) -> StepReport:
    report = run_prep(folder, step)
    resumed = report["bytes"]["resumed"]
    total = format_bytes(resumed + report["bytes"]["written"])
    return _converted(step, report, f"resumed from {format_bytes(resumed)} of {total}")


def _compare_outputs(folder: Path, step: DemoStep) -> StepReport:
    report = run_prep(folder, step)
    num_files = _check_same_files(folder / INIT, folder / UNBROKEN)
    return _converted(step, report, f"{num_files} files, byte for byte equal to the killed run")


def _verify(folder: Path, step: DemoStep) -> StepReport:
    report = run_prep(folder, step)
    files = [path for name in step.args[1:] for path in (folder / name).glob("*.safetensors")]
    result = f"{report['tensors']} tensors, {report['values']:,} values: 0 bits changed"
    return step.passed(result, sum(path.stat().st_size for path in files))


def _write_text_and_recipe(folder: Path, step: DemoStep) -> StepReport:
    words = learnable_text()
    write_file(folder / TEXT, words.encode())
    write_file(folder / RECIPE, RECIPE_TEXT.encode())
    num_words = SENTENCES * SENTENCE_WORDS
    return step.passed(f"{num_words:,} words, {len(TEXT_WORDS)} different ones", len(words))


def _train(folder: Path, step: DemoStep) -> StepReport:
    report = run_prep(folder, step)
    _check(report["step"] == STEPS, f"it ended at step {report['step']}")
    losses = [loss for _, loss in logged_losses(folder / UNBROKEN_RUN)]
    change = f"{losses[0]:.2f} -> {losses[-1]:.2f}"
    # An untrained model guesses among 257 words: ln 257 = 5.55. That only 64 of them occur gives ln 64 = 4.16.
    _check(losses[-1] < losses[0] - 1, f"the loss did not fall: {change}")
    return step.passed(f"loss {change} in {STEPS} steps", _step_nbytes(folder / UNBROKEN_RUN))


def _kill_training(folder: Path, step: DemoStep) -> StepReport:
    """Kill the run when a step is durable and a later one is logged.

    Steps continue during a save: the durable step can be any number of steps behind.
    """
    run = folder / KILLED_RUN

    def should_kill(pid: int) -> bool:
        saved = saved_steps(run)
        # Each step is logged.
        return bool(saved) and len(logged_losses(run)) > saved[-1]

    for tries in range(1, MAX_KILL_TRIES + 1):
        _remove_output(run)
        was_killed = not run_prep(folder, step, should_kill)
        saved = saved_steps(run)
        if was_killed and saved and saved[-1] != STEPS:
            killed = f"killed after step {len(logged_losses(run))}, step {saved[-1]} is durable"
            return step.passed(killed + _tries_note(tries), _step_nbytes(run))
    raise _not_killed_error()


def _resume_training(folder: Path, step: DemoStep) -> StepReport:
    """Resume the stopped run, and check its losses and last step against the undisturbed run."""
    run = folder / KILLED_RUN
    unbroken = folder / UNBROKEN_RUN
    saved = saved_steps(run)[-1]
    report = run_prep(folder, step)
    _check(report["resumed_at"] == saved, f"it resumed at step {report['resumed_at']}, not {saved}")
    has_same_losses = logged_losses(run) == logged_losses(unbroken)
    _check(has_same_losses, "its losses differ from the undisturbed run")
    _check_same_files(step_folder(run, STEPS), step_folder(unbroken, STEPS))
    equal = f"step {STEPS} is byte for byte equal to the undisturbed run"
    return step.passed(f"resumed at step {saved}; {equal}", _step_nbytes(run))


def _tries_note(tries: int) -> str:
    return "" if tries == 1 else f" (try {tries}: it was too fast)"


def _not_killed_error() -> PrepError:
    what = f"the run ended {MAX_KILL_TRIES} times before it could be killed"
    why = "this machine is too fast, or too busy to look at the run in time"
    return PrepError(what, why, "try again")


def _converted(step: DemoStep, report: Mapping[str, Any], result: str) -> StepReport:
    memory = report["memory"]
    _check(memory["peak"] <= memory["budget"], f"it took {format_bytes(memory['peak'])} of memory")
    return step.passed(result, report["bytes"]["written"], memory["peak"])


def _check(condition: bool, message: str) -> None:
    # The message is the whole error: a wrong result of a step has no cause that a user could change.
    if not condition:
        raise PrepError(message)


def _check_same_files(folder: Path, other: Path) -> int:
    """Check that two folders have files of equal names and bytes, and return their number."""
    names, other_names = (
        {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        for root in (folder, other)
    )
    # shallow=False compares contents. The default trusts equal sizes and times.
    _, *different = filecmp.cmpfiles(folder, other, names | other_names, shallow=False)
    unequal = ", ".join(sorted(chain.from_iterable(different)))
    _check(not unequal, f"different files in {folder.name}: {unequal}")
    return len(names)


def logged_losses(run: Path) -> list[tuple[float, float]]:
    """Return step and loss of each line of a run's metrics with a loss."""
    points: list[tuple[float, float]] = []
    for line in read_metrics(run / METRICS_FILE):
        loss = line.get("loss")
        if isinstance(loss, float):
            points.append((line_step(line), loss))
    return points


def _step_nbytes(run: Path) -> int:
    """Return the bytes of the last step of a run."""
    last_step = step_folder(run, saved_steps(run)[-1])
    return sum(path.stat().st_size for path in last_step.rglob("*") if path.is_file())


def _remove_output(out: Path) -> None:
    for path in (out, _partial(out)):
        shutil.rmtree(path, ignore_errors=True)
    if out.is_file():
        out.unlink()


def _partial(out: Path) -> Path:
    """Return the path of an output before it is complete."""
    return out.with_name(out.name + ".partial")


# --- The run


def run_demo(out: Path, observer: Observer, steps: Sequence[DemoStep] | None = None) -> Report:
    """Make a tiny model in the folder `out`, convert it in both directions, train it, and check each step.

    Args:
        out: New or empty folder, or the folder of an earlier demo. Its outputs are replaced.
        observer: Receives a note before and after each step.
        steps: Some of the steps, without a page. None means all.

    Returns:
        The table of the steps, up to the first one that failed, with its error. If all passed, a page with pictures was
        written.

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
    last = reports[-1]
    fields: dict[str, object] = {"output": out, "steps": reports}
    header = ("step", "seconds", "bytes", "memory", "result")
    rows = [report.row for report in reports]
    table = Table(header, rows, right_aligned=header[1:4], wrapped=["result"])
    if not last.ok:
        what = f"the demo failed at step {len(reports)}: {last.step}"
        return Report([table], fields, error=PrepError(what, last.result, last.hint))
    page = out / REPORT
    if steps is None:
        write_html_page(page, "prep demo", _page_body(out, reports))
    fields["report"] = str(page)
    closing = f"all {count} steps passed; report with pictures: {page}"
    return Report([table, closing], fields, "run the same commands with your own model")


def _prepare_folder(out: Path) -> None:
    """Create the demo's folder, or delete the outputs of an earlier demo from it.

    Raises:
        PrepError: The folder was not made by a demo, or cannot be created.
    """
    # Only a folder with the marker loses files, so a folder of the user with the same name stays as it is.
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        what = f"{out} already exists and is not a demo's folder"
        raise usage_error(what, f"it has no {MARKER}", _demo_command("NAME"))
    for name in OUTPUTS:
        _remove_output(out / name)
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
    if step.args:
        observer.note(f"      $ {step.command}")
    start_s = time.monotonic()
    notes = PacedNotes(observer)

    def describe() -> str:
        line = f"      {format_duration(time.monotonic() - start_s)}"
        if not step.training_run:
            return line
        return f"{line}, {len(logged_losses(folder / step.training_run))} of {STEPS} steps"

    try:
        with ticking(lambda: notes.note_if_due(describe)):
            report = step.run(folder, step)
    except (OSError, PrepError) as error:
        result, hint = _failure_texts(error, folder)
        report = StepReport(step.title, step.command, result=result, hint=hint)
    return replace(report, seconds=round(time.monotonic() - start_s, 3))


def _failure_texts(error: OSError | PrepError, folder: Path) -> tuple[str, str]:
    """Return what failed in a step, and the command to type."""
    if isinstance(error, OSError):
        what = f"cannot read or write {error.filename or folder} - {error.strerror or error}"
        error = PrepError(what, "check the permissions of the folder")
    result = str(error.with_texts(hint=""))
    # The message of a killed or crashed process may lack the name of the disk that was full.
    for path in (folder, Path(os.environ.get("TMPDIR") or "/tmp")):
        if path.is_dir() and shutil.disk_usage(path).free < MIN_FREE_NBYTES:
            result = f"the disk that holds {path} is full - {result}"
            return result, "free some space, and try again"
    # A command without an error has its outputs now: alone it would do something else.
    return result, error.hint or _demo_command(str(folder))


def run_prep(
    folder: Path, step: DemoStep, should_kill: Callable[[int], bool] | None = None
) -> dict[str, Any]:
    """Run the command of a step in the demo's folder, and return its JSON object, or {} if it was killed.

    The command gets a SIGKILL as soon as `should_kill` of its process id is true. The hint of an error runs it again.
    """
    env = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / JAX_CACHE).resolve()),
        # By default JAX caches only programs that took more than a second to compile. Those of a tiny model are faster.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # A cache that the user has set wins. The demo is offline in any case.
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        **step.env,
    }
    # -P: the working folder of the demo is not on sys.path.
    argv = [sys.executable, "-P", "-m", "prepcli", *step.args, "--json", "--quiet"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, cwd=folder, env=env, text=True, stdout=pipe, stderr=pipe)
    try:
        while should_kill is not None and process.poll() is None:
            if should_kill(process.pid):
                process.kill()
                break
            time.sleep(POLL_EVERY_S)
        stdout, stderr = process.communicate()
    finally:
        # Also after Ctrl-C and errors of `should_kill`: no process outlives the demo.
        process.kill()
        process.wait()
    if should_kill is not None and process.returncode == -signal.SIGKILL:
        return {}
    what = f"prep {step.args[0]} ended with {process.returncode}"
    hint = f"`cd {shlex.quote(str(folder))} && {step.command}`"
    try:
        report = json.loads(stdout)
    except ValueError:
        raise PrepError(what, stderr.strip()[-200:], hint) from None
    if process.returncode or not report["ok"]:
        why = " - ".join(filter(None, (report["error"]["what"], report["error"]["why"])))
        raise PrepError(what, why, hint)
    return report


def _page_body(out: Path, steps: Sequence[StepReport]) -> Iterator[str]:
    """Yield the parts of the report: a self-contained page with pictures."""
    yield "<h1>prep demo</h1>"
    yield (
        "<p>A tiny GPT-Neo with 257 words is padded, converted, resharded to eight devices,"
        " exported and trained. Two runs are killed and resumed."
        f" All {len(steps)} steps passed.</p>"
    )
    rows: list[tuple[str, ...]] = []
    for step in steps:
        command = f"<br><code>$ {escape(step.command)}</code>" if step.command else ""
        title = Markup(escape(step.step) + command)
        rows.append((title, format_duration(step.seconds), format_bytes(step.bytes), step.result))
    yield "<h2>Steps</h2>"
    header = ("step", "time", "bytes", "result")
    yield from html_table(Table(header, rows, right_aligned=header[1:3]))
    # The narrow curve of the killed run lies on the wide curve of the other run.
    curves = [
        Curve(name="undisturbed", points=logged_losses(out / UNBROKEN_RUN), width=7.0),
        Curve(name="resumed", points=logged_losses(out / KILLED_RUN), color=1, width=2.0),
    ]
    save_marks = [(float(step), "saved") for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    # The results of the kill and of the resumption.
    results = [step.result for step in steps if step.command.endswith(f"--out {KILLED_RUN}")]
    yield f"<h2>Training</h2><p>The loss by step. The second run: {escape('; '.join(results))}.</p>"
    yield legend([curve.name for curve in curves])
    yield line_chart(
        curves, "loss by step", x_name="step", y_name="loss", marks=save_marks, has_legend=False
    )
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
    bars = [Bar(step.step, step.peak, format_bytes(step.peak)) for step in steps if step.peak]
    yield "<h2>Memory</h2><p>Peak memory of each conversion above its start.</p>"
    yield from bar_table(bars, ("conversion", "peak"))
