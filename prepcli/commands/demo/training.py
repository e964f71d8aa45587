"""Second half of the demo: train on 8 devices, kill and resume a run, and export the result."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.commands.demo.conversion import RESHARDED
from prepcli.commands.demo.steps import (
    MAX_KILL_TRIES,
    DemoStep,
    StepOutcome,
    check,
    conversion_outcome,
    list_files,
    never_killed_error,
    remove_output,
    retry_note,
    run_and_kill,
    run_prep,
)
from prepcli.commands.demo.tiny_model import VOCABULARY, WORDS
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.stores.writing import write_file

TEXT = "tiny.txt"
RECIPE = "tiny.toml"
UNBROKEN = "runs/unbroken"
KILLED = "runs/tiny"
LEARNED = "tiny-learned"
OUTPUTS = (TEXT, RECIPE, "runs", LEARNED)
DEVICES = {"JAX_NUM_CPU_DEVICES": "8"}
STEPS = 12
SAVE_EVERY = 4
# A model that never saw these words learns them in a few steps.
TEXT_WORDS = WORDS[:64]
SENTENCES = 2000
SENTENCE_WORDS = 12
# Number of words that may follow each word.
FOLLOWERS = 2
SEED = 0
UNBROKEN_ARGS = ("train", RECIPE, "--out", UNBROKEN)
KILLED_ARGS = ("train", RECIPE, "--out", KILLED)

RECIPE_TEXT = f"""\
# A tiny GPT-Neo learns a language of {len(TEXT_WORDS)} words; {FOLLOWERS} different words may follow each word.
seed = 1
mesh = "1,2,4"                # dp, fsdp, mp: 8 devices

[model]
path = "{RESHARDED}"

[data]
type = "text"
path = "{TEXT}"
seq_length = 32
holdout = 0.02

[batch]
size = 8                      # sequences per step

[optimizer]
lr = 6e-4
schedule = "cosine"
warmup_steps = 2
weight_decay = 0.1

[train]
steps = {STEPS}
log_every = 1
eval_every = {STEPS // 2}

[checkpoint]
every = {SAVE_EVERY}
"""


def training_steps() -> tuple[DemoStep, ...]:
    """Return the steps from the resharded checkpoint to a Hugging Face folder with the trained model."""
    return (
        DemoStep("write a text and a recipe", (), _write_text_and_recipe),
        DemoStep(
            "train on 8 devices", UNBROKEN_ARGS, _train_model, DEVICES, _count_steps(UNBROKEN)
        ),
        DemoStep("train, kill -9", KILLED_ARGS, _kill_training, DEVICES, _count_steps(KILLED)),
        DemoStep(
            "resume the same command", KILLED_ARGS, _resume_training, DEVICES, _count_steps(KILLED)
        ),
        DemoStep(
            "export the trained model", ("export", KILLED, "--out", LEARNED), _export_trained_model
        ),
        DemoStep("verify against the run", ("verify", LEARNED, KILLED), _verify_export),
    )


def _count_steps(run: str) -> Callable[[Path], tuple[int, int]]:
    """Return a function for the number of logged and of all steps of a run."""
    return lambda folder: (len(logged_losses(folder, run)), STEPS)


def _write_text_and_recipe(folder: Path, _args: Sequence[str]) -> StepOutcome:
    """Write a text in a learnable language, in which only a few words may follow each word, and a recipe."""
    random = np.random.default_rng(SEED)
    followers = random.integers(0, len(TEXT_WORDS), (len(TEXT_WORDS), FOLLOWERS))
    lines: list[str] = []
    while len(lines) < SENTENCES:
        words = [TEXT_WORDS[word] for word in _sentence(random, followers)]
        lines.append(" ".join(words))
    text = "\n".join(lines) + "\n"
    write_file(folder / TEXT, text.encode())
    write_file(folder / RECIPE, RECIPE_TEXT.encode())
    return StepOutcome(
        f"{SENTENCES * SENTENCE_WORDS:,} words, {len(TEXT_WORDS)} different ones", len(text)
    )


def _sentence(random: np.random.Generator, followers: np.ndarray) -> Iterator[int]:
    word = int(random.integers(len(TEXT_WORDS)))
    for choice in random.integers(0, FOLLOWERS, SENTENCE_WORDS):
        yield word
        word = int(followers[word, choice])


def _train_model(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args, **DEVICES)
    check(report["step"] == STEPS, f"it ended at step {report['step']}")
    losses = logged_losses(folder, UNBROKEN)
    # An untrained model guesses among 257 words: ln 257 = 5.55. That only 64 of them occur gives ln 64 = 4.16.
    check(losses[-1] < losses[0] - 1, f"the loss did not fall: {losses[0]:.2f} -> {losses[-1]:.2f}")
    return StepOutcome(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps",
        _last_step_nbytes(folder, UNBROKEN),
    )


def logged_losses(folder: Path, run: str) -> list[float]:
    """Return the loss of each logged step."""
    from trainer.training.metrics import METRICS_FILE, read_metrics

    losses: list[float] = []
    for line in read_metrics(folder / run / METRICS_FILE):
        loss = line.get("loss")
        if isinstance(loss, float):
            losses.append(loss)
    return losses


def _last_step_nbytes(folder: Path, run: str) -> int:
    """Return the bytes of the run's last checkpoint."""
    last_step = step_folder(folder / run, saved_steps(folder / run)[-1])
    return sum((last_step / name).stat().st_size for name in list_files(last_step))


def _kill_training(folder: Path, args: Sequence[str]) -> StepOutcome:
    """Kill the run when a step is durable and a later one is logged.

    Try again if the run ended before.
    """
    run = folder / KILLED
    for tries in range(1, MAX_KILL_TRIES + 1):
        remove_output(run)
        was_killed = run_and_kill(folder, args, lambda: _has_steps_to_lose(folder), **DEVICES)
        saved = saved_steps(run)
        if was_killed and saved and saved[-1] < STEPS:
            text = f"killed after step {_last_logged_step(folder)}, step {saved[-1]} is durable{retry_note(tries)}"
            return StepOutcome(text, _last_step_nbytes(folder, KILLED))
    raise never_killed_error()


def _has_steps_to_lose(folder: Path) -> bool:
    """Return whether the run has a durable step, and has logged a later one.

    Steps continue during a save: the durable step can be any number of steps behind.
    """
    saved = saved_steps(folder / KILLED)
    return bool(saved) and _last_logged_step(folder) > saved[-1]


def _last_logged_step(folder: Path) -> int:
    """Return the last logged step. It is the number of log lines, because each step is logged."""
    return len(logged_losses(folder, KILLED))


def _resume_training(folder: Path, args: Sequence[str]) -> StepOutcome:
    """Resume the stopped run, and check its losses and last step against the undisturbed run."""
    saved = saved_steps(folder / KILLED)[-1]
    report = run_prep(folder, args, **DEVICES)
    check(report["resumed_at"] == saved, f"it resumed at step {report['resumed_at']}, not {saved}")
    check(
        logged_losses(folder, KILLED) == logged_losses(folder, UNBROKEN),
        "its losses differ from the undisturbed run",
    )
    resumed_step = step_folder(folder / KILLED, STEPS)
    unbroken_step = step_folder(folder / UNBROKEN, STEPS)
    names = list_files(resumed_step)
    check(names == list_files(unbroken_step), "its last step has different files")
    _, differing, unreadable = filecmp.cmpfiles(resumed_step, unbroken_step, names, shallow=False)
    check(
        not differing and not unreadable, f"different files: {', '.join([*differing, *unreadable])}"
    )
    return StepOutcome(
        f"resumed at step {saved}; step {STEPS} is byte for byte equal to the undisturbed run",
        _last_step_nbytes(folder, KILLED),
    )


def _export_trained_model(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    vocab: dict[str, Any] = report["vocab"]
    check(vocab["written"] == len(VOCABULARY), f"the vocabulary became {vocab}")
    return conversion_outcome(report, f"{vocab['written']} rows, ready for transformers")


def _verify_export(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    nbytes = sum(path.stat().st_size for path in (folder / LEARNED).glob("*.safetensors"))
    return StepOutcome(
        f"{report['tensors']} tensors, {report['values']:,} values: 0 bits changed", nbytes
    )
