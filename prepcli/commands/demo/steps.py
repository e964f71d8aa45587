"""The steps of the demo: the commands that a user types, and checks of their results."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prepcli.commands.demo.tiny_model import (
    RECIPE_TEXT,
    RESHARDED,
    SENTENCE_WORDS,
    SENTENCES,
    STEPS,
    TEXT,
    TEXT_WORDS,
    VOCABULARY,
    learnable_text,
    write_tiny_model,
)
from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes
from prepcli.execution.finalize import WORK_FOLDER
from prepcli.execution.run_store import DONE_FOLDER
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.stores.files import write_file
from trainer.training.metrics import METRICS_FILE, line_step, read_metrics

MODEL = "tiny"
PADDED = "tiny-padded"
INIT = "tiny-padded-init"
UNBROKEN = "unbroken"
EXPORTED = "tiny-hf"
RECIPE = "tiny.toml"
RUNS = "runs"
UNBROKEN_RUN = "runs/unbroken"
KILLED_RUN = "runs/tiny"
LEARNED = "tiny-learned"
OUTPUTS = (
    *(MODEL, PADDED, INIT, UNBROKEN, RESHARDED, EXPORTED),
    *(TEXT, RECIPE, RUNS, LEARNED),
)
# A small budget yields many small steps, and so many moments for a kill.
SAVE_INIT = ("save-init", PADDED, "--mesh", "1,1,1", "--memory", "32MiB")
TRAIN = ("train", RECIPE, "--out")
# In the demo's folder. Three steps train the same model. With the cache only the first one compiles it.
JAX_CACHE = ".jax-cache"
POLL_EVERY_S = 0.0005
# The command may end before it is killed.
MAX_KILL_TRIES = 5


class CommandError(PrepError):
    """A command of a step failed. Running it again shows its whole message."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of a step: a line for the user, the bytes written, and the peak memory."""

    result: str
    nbytes: int
    peak_nbytes: int = 0


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
    run: Callable[[Path, DemoStep], StepOutcome]
    training_run: str = ""

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables of the command."""
        return {"JAX_NUM_CPU_DEVICES": "8"} if self.training_run else {}


def demo_steps() -> tuple[DemoStep, ...]:
    """Return the steps from a model with an odd vocabulary to eight devices and back, and a training there."""
    return (
        DemoStep("make a tiny GPT-Neo", (), _make_model),
        DemoStep("pad its vocabulary", ("pad-vocab", MODEL, "--multiple", "8"), _pad_vocab),
        DemoStep("save an init, kill -9", SAVE_INIT, _kill_conversion),
        DemoStep("resume the same command", SAVE_INIT, _resume_conversion),
        DemoStep("convert without a kill", (*SAVE_INIT, "--out", UNBROKEN), _compare_outputs),
        DemoStep("reshard to 8 devices", ("reshard", INIT, "--mesh", "1,2,4"), _reshard),
        DemoStep("export to Hugging Face", ("export", RESHARDED), partial(_export, "true rows")),
        DemoStep("verify against the start", ("verify", EXPORTED, MODEL), _verify_start),
        DemoStep("write a text and a recipe", (), _write_text_and_recipe),
        DemoStep("train on 8 devices", (*TRAIN, UNBROKEN_RUN), _train, UNBROKEN_RUN),
        DemoStep("train, kill -9", (*TRAIN, KILLED_RUN), _kill_training, KILLED_RUN),
        DemoStep("resume the same command", (*TRAIN, KILLED_RUN), _resume_training, KILLED_RUN),
        DemoStep(
            "export the trained model",
            ("export", KILLED_RUN, "--out", LEARNED),
            partial(_export, "rows, ready for transformers"),
        ),
        DemoStep("verify against the run", ("verify", LEARNED, KILLED_RUN), _verify),
    )


def run_prep(
    folder: Path, step: DemoStep, should_kill: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """Run the command of a step in the demo's folder, and return its JSON object, or {} if it was killed.

    CommandError with its message if it fails. The command gets a SIGKILL as soon as `should_kill` is true.
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
            if should_kill():
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
    try:
        report = json.loads(stdout)
    except ValueError:
        raise CommandError(what, stderr.strip()[-200:]) from None
    if process.returncode or not report["ok"]:
        raise CommandError(what, report["error"]["what"], report["error"]["why"])
    return report


def check(condition: bool, message: str) -> None:
    """Raise PrepError with the message unless the condition holds.

    The message is the whole error: a wrong result of a step has no cause that a user could change.
    """
    if not condition:
        raise PrepError(message)


def _kill(
    folder: Path,
    step: DemoStep,
    output: str,
    should_kill: Callable[[bool], bool],
    describe: Callable[[], StepOutcome | None],
) -> StepOutcome:
    """Kill the command of a step, and return what is left. Try again if the command ended before.

    `should_kill` is called with whether this is the last try. `describe` returns None if the output is complete.
    """
    for tries in range(1, MAX_KILL_TRIES + 1):
        remove_output(folder / output)
        report = run_prep(folder, step, partial(should_kill, tries == MAX_KILL_TRIES))
        outcome = None if report else describe()
        if outcome is not None:
            note = "" if tries == 1 else f" (try {tries}: it was too fast)"
            return replace(outcome, result=outcome.result + note)
    what = f"the run ended {MAX_KILL_TRIES} times before it could be killed"
    why = "this machine is too fast, or too busy to look at the run in time"
    raise PrepError(what, why, "try again")


def remove_output(out: Path) -> None:
    """Remove an output, complete or partial."""
    for path in (out, _partial(out)):
        shutil.rmtree(path, ignore_errors=True)
    if out.is_file():
        out.unlink()


def _partial(out: Path) -> Path:
    """Return the path of an output before it is complete."""
    return out.with_name(out.name + ".partial")


def _conversion_outcome(report: Mapping[str, Any], result: str) -> StepOutcome:
    memory = report["memory"]
    check(memory["peak"] <= memory["budget"], f"it took {format_bytes(memory['peak'])} of memory")
    return StepOutcome(result, report["bytes"]["written"], memory["peak"])


def _check_same_files(folder: Path, other: Path) -> int:
    """Check that two folders have files of equal names and bytes, and return their number."""
    names, other_names = (
        sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        for root in (folder, other)
    )
    check(names == other_names, f"{folder.name} and {other.name} have different files")
    # shallow=False compares contents. The default trusts equal sizes and times.
    _, differing, unreadable = filecmp.cmpfiles(folder, other, names, shallow=False)
    different = [*differing, *unreadable]
    check(not different, f"different files in {folder.name}: {', '.join(different)}")
    return len(names)


def _make_model(folder: Path, step: DemoStep) -> StepOutcome:
    nbytes = write_tiny_model(folder / MODEL)
    num_files = len([*(folder / MODEL).glob("*.safetensors")])
    return StepOutcome(f"{len(VOCABULARY)} words, {num_files} files", nbytes)


def _pad_vocab(folder: Path, step: DemoStep) -> StepOutcome:
    report = run_prep(folder, step)
    vocab = report["vocab"]
    is_padded = vocab["true"] == len(VOCABULARY) and vocab["padded"] % 8 == 0
    check(is_padded, f"the vocabulary became {vocab}")
    return _conversion_outcome(report, f"{vocab['true']} -> {vocab['padded']} rows")


def _kill_conversion(folder: Path, step: DemoStep) -> StepOutcome:
    """Kill the command while the output is partly written and some bytes are durable."""
    partial_output = _partial(folder / INIT)

    def should_kill(is_last_try: bool) -> bool:
        # The last try only needs bytes in data files.
        is_durable = _durable_nbytes(partial_output) > 0
        return is_durable or (is_last_try and _data_nbytes(partial_output) > 0)

    def describe() -> StepOutcome | None:
        if not partial_output.exists():
            return None
        durable = _durable_nbytes(partial_output)
        share = durable / _data_nbytes(partial_output)
        result = f"killed at {share:.0%}, {format_bytes(durable)} durable; no {INIT}"
        return StepOutcome(result, durable)

    return _kill(folder, step, INIT, should_kill, describe)


def _data_nbytes(partial_output: Path) -> int:
    """Return the size of the data files, or 0 once the output has its final name."""
    try:
        return sum(path.stat().st_size for path in partial_output.glob("d/*"))
    except FileNotFoundError:
        return 0


def _durable_nbytes(partial_output: Path) -> int:
    """Return the number of durable bytes in the notes of the run."""
    notes = (partial_output / WORK_FOLDER / DONE_FOLDER).glob("*")
    return sum(json.loads(note.read_bytes())["nbytes"] for note in notes)


def _resume_conversion(folder: Path, step: DemoStep) -> StepOutcome:
    durable = _durable_nbytes(_partial(folder / INIT))
    report = run_prep(folder, step)
    resumed = report["bytes"]["resumed"]
    check(resumed == durable, f"{durable:,} bytes were durable, but it resumed from {resumed:,}")
    total = format_bytes(resumed + report["bytes"]["written"])
    return _conversion_outcome(report, f"resumed from {format_bytes(resumed)} of {total}")


def _compare_outputs(folder: Path, step: DemoStep) -> StepOutcome:
    report = run_prep(folder, step)
    num_files = _check_same_files(folder / INIT, folder / UNBROKEN)
    return _conversion_outcome(report, f"{num_files} files, byte for byte equal to the killed run")


def _reshard(folder: Path, step: DemoStep) -> StepOutcome:
    report = run_prep(folder, step)
    mesh = report["mesh"]
    return _conversion_outcome(report, f"{mesh['from']} -> {mesh['to']}, {report['chunks']} chunks")


def _export(rows_text: str, folder: Path, step: DemoStep) -> StepOutcome:
    report = run_prep(folder, step)
    vocab = report["vocab"]
    check(vocab["written"] == len(VOCABULARY), f"the vocabulary became {vocab}")
    return _conversion_outcome(report, f"{vocab['written']} {rows_text}")


def _verify(folder: Path, step: DemoStep) -> StepOutcome:
    report = run_prep(folder, step)
    files = [path for name in step.args[1:] for path in (folder / name).glob("*.safetensors")]
    result = f"{report['tensors']} tensors, {report['values']:,} values: 0 bits changed"
    return StepOutcome(result, sum(path.stat().st_size for path in files))


def _verify_start(folder: Path, step: DemoStep) -> StepOutcome:
    """Compare the exported model with the one at the start, and their settings too."""
    outcome = _verify(folder, step)
    models = [folder / name for name in step.args[1:]]
    is_same_tokenizer = filecmp.cmp(*(model / "tokenizer.json" for model in models), shallow=False)
    configs = [json.loads((model / "config.json").read_bytes()) for model in models]
    check(is_same_tokenizer and configs[0] == configs[1], "the settings differ from the start")
    return outcome


def _write_text_and_recipe(folder: Path, step: DemoStep) -> StepOutcome:
    words = learnable_text()
    write_file(folder / TEXT, words.encode())
    write_file(folder / RECIPE, RECIPE_TEXT.encode())
    num_words = SENTENCES * SENTENCE_WORDS
    return StepOutcome(f"{num_words:,} words, {len(TEXT_WORDS)} different ones", len(words))


def logged_losses(run: Path) -> list[tuple[float, float]]:
    """Return step and loss of each line of a run's metrics with a loss."""
    points: list[tuple[float, float]] = []
    for line in read_metrics(run / METRICS_FILE):
        loss = line.get("loss")
        if isinstance(loss, float):
            points.append((line_step(line), loss))
    return points


def _last_step_nbytes(run: Path) -> int:
    """Return the bytes of the run's last checkpoint."""
    last_step = step_folder(run, saved_steps(run)[-1])
    return sum(path.stat().st_size for path in last_step.rglob("*") if path.is_file())


def _train(folder: Path, step: DemoStep) -> StepOutcome:
    report = run_prep(folder, step)
    check(report["step"] == STEPS, f"it ended at step {report['step']}")
    losses = [loss for _, loss in logged_losses(folder / UNBROKEN_RUN)]
    change = f"{losses[0]:.2f} -> {losses[-1]:.2f}"
    # An untrained model guesses among 257 words: ln 257 = 5.55. That only 64 of them occur gives ln 64 = 4.16.
    check(losses[-1] < losses[0] - 1, f"the loss did not fall: {change}")
    return StepOutcome(f"loss {change} in {STEPS} steps", _last_step_nbytes(folder / UNBROKEN_RUN))


def _kill_training(folder: Path, step: DemoStep) -> StepOutcome:
    """Kill the run when a step is durable and a later one is logged.

    Steps continue during a save: the durable step can be any number of steps behind.
    """
    run = folder / KILLED_RUN

    def should_kill(_is_last_try: bool) -> bool:
        saved = saved_steps(run)
        # Each step is logged.
        return bool(saved) and len(logged_losses(run)) > saved[-1]

    def describe() -> StepOutcome | None:
        saved = saved_steps(run)
        if not saved or saved[-1] == STEPS:
            return None
        result = f"killed after step {len(logged_losses(run))}, step {saved[-1]} is durable"
        return StepOutcome(result, _last_step_nbytes(run))

    return _kill(folder, step, KILLED_RUN, should_kill, describe)


def _resume_training(folder: Path, step: DemoStep) -> StepOutcome:
    """Resume the stopped run, and check its losses and last step against the undisturbed run."""
    run = folder / KILLED_RUN
    unbroken = folder / UNBROKEN_RUN
    saved = saved_steps(run)[-1]
    report = run_prep(folder, step)
    check(report["resumed_at"] == saved, f"it resumed at step {report['resumed_at']}, not {saved}")
    has_same_losses = logged_losses(run) == logged_losses(unbroken)
    check(has_same_losses, "its losses differ from the undisturbed run")
    _check_same_files(step_folder(run, STEPS), step_folder(unbroken, STEPS))
    equal = f"step {STEPS} is byte for byte equal to the undisturbed run"
    return StepOutcome(f"resumed at step {saved}; {equal}", _last_step_nbytes(run))
