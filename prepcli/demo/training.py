"""The second half of the demo: train on 8 devices, be killed at it, go on to the same bits, export what was learned."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.demo.conversion import RESHARDED
from prepcli.demo.steps import (
    DemoStep,
    StepOutcome,
    check,
    conversion_outcome,
    list_files,
    remove_output,
    run_and_kill,
    run_prep,
)
from prepcli.demo.tiny_model import VOCABULARY, WORDS
from prepcli.errors import PrepError
from prepcli.execution.run_folder import saved_steps, step_folder

TEXT, RECIPE, UNBROKEN, KILLED, LEARNED = "tiny.txt", "tiny.toml", "runs/unbroken", "runs/tiny", "tiny-learned"
OUTPUTS = (TEXT, RECIPE, "runs", LEARNED)
DEVICES = {"JAX_NUM_CPU_DEVICES": "8"}
STEPS, SAVE_EVERY = 24, 8
SENTENCES, SENTENCE_WORDS, FOLLOWERS, SEED = 2000, 12, 2, 0
UNBROKEN_ARGS = ("train", RECIPE, "--out", UNBROKEN)
KILLED_ARGS = ("train", RECIPE, "--out", KILLED)

RECIPE_TEXT = f"""\
# A tiny GPT-Neo learns a language of {len(WORDS)} words, each of which is followed by one of {FOLLOWERS}.
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
size = 8                      # sequences a step

[optimizer]
lr = 6e-4
schedule = "cosine"
warmup_steps = 4
weight_decay = 0.1

[train]
steps = {STEPS}
log_every = 1
eval_every = {STEPS // 2}

[checkpoint]
every = {SAVE_EVERY}
"""


def training_steps() -> tuple[DemoStep, ...]:
    """From the checkpoint laid out for 8 devices to a Hugging Face folder of what was learned."""
    return (
        DemoStep("write a text and a recipe", (), _write),
        DemoStep("train on 8 devices", UNBROKEN_ARGS, _train, DEVICES),
        DemoStep("train, kill -9", KILLED_ARGS, _kill, DEVICES),
        DemoStep("the same again", KILLED_ARGS, _resume, DEVICES),
        DemoStep("export what was learned", ("export", KILLED, "--out", LEARNED), _export),
        DemoStep("compare with the run", ("verify", LEARNED, KILLED), _verify),
    )


def _write(folder: Path, _: Sequence[str]) -> StepOutcome:
    """A language that can be learned: after each word only few may follow."""
    random = np.random.default_rng(SEED)
    followers = random.integers(0, len(WORDS), (len(WORDS), FOLLOWERS))
    lines = [" ".join(WORDS[word] for word in _sentence(random, followers)) for _ in range(SENTENCES)]
    text = "\n".join(lines) + "\n"
    (folder / TEXT).write_text(text)
    (folder / RECIPE).write_text(RECIPE_TEXT)
    return StepOutcome(f"{SENTENCES * SENTENCE_WORDS:,} words of {len(VOCABULARY)}", len(text))


def _sentence(random: np.random.Generator, followers: np.ndarray) -> Iterator[int]:
    word = int(random.integers(len(WORDS)))
    for choice in random.integers(0, FOLLOWERS, SENTENCE_WORDS):
        yield word
        word = int(followers[word, choice])


def _train(folder: Path, words: Sequence[str]) -> StepOutcome:
    found = run_prep(folder, words, **DEVICES)
    check(found["step"] == STEPS, f"it ended at step {found['step']}")
    losses = logged_losses(folder, UNBROKEN)
    check(losses[-1] < losses[0] - 1, f"the loss did not fall: {losses[0]:.2f} -> {losses[-1]:.2f}")
    return StepOutcome(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps", _last_step_nbytes(folder, UNBROKEN)
    )


def logged_losses(folder: Path, run: str) -> list[float]:
    """The loss of every step that a run logged."""
    from trainer.training.metrics import METRICS_FILE, read_metrics

    return [line["loss"] for line in read_metrics(folder / run / METRICS_FILE) if "loss" in line]


def _last_step_nbytes(folder: Path, run: str) -> int:
    last = step_folder(folder / run, saved_steps(folder / run)[-1])
    return sum((last / name).stat().st_size for name in list_files(last))


def _kill(folder: Path, words: Sequence[str]) -> StepOutcome:
    """After the first checkpoint, a few steps on; the steps since it are lost, and nothing else is."""
    run = folder / KILLED
    remove_output(run)
    if not run_and_kill(folder, words, lambda: len(logged_losses(folder, KILLED)) > SAVE_EVERY + 2, **DEVICES):
        raise PrepError("the run was over before it could be killed", "this machine is too fast")
    done, saved = len(logged_losses(folder, KILLED)), saved_steps(run)
    check(bool(saved) and saved[-1] < STEPS, f"the steps that it saved are {saved}")
    return StepOutcome(f"killed after step {done}, step {saved[-1]} is durable", _last_step_nbytes(folder, KILLED))


def _resume(folder: Path, words: Sequence[str]) -> StepOutcome:
    saved = saved_steps(folder / KILLED)[-1]
    found = run_prep(folder, words, **DEVICES)
    check(found["resumed_at"] == saved, f"it went on from step {found['resumed_at']}, not {saved}")
    check(
        logged_losses(folder, KILLED) == logged_losses(folder, UNBROKEN), "its losses are not those of the unbroken run"
    )
    ours, theirs = (step_folder(folder / run, STEPS) for run in (KILLED, UNBROKEN))
    names = list_files(ours)
    check(names == list_files(theirs), "its last step has other files")
    _, differing, unread = filecmp.cmpfiles(ours, theirs, names, shallow=False)
    check(not differing and not unread, f"not the same: {', '.join([*differing, *unread])}")
    return StepOutcome(
        f"went on from step {saved}; step {STEPS} is byte for byte that of the unbroken run",
        _last_step_nbytes(folder, KILLED),
    )


def _export(folder: Path, words: Sequence[str]) -> StepOutcome:
    found = run_prep(folder, words)
    vocab: dict[str, Any] = found["vocab"]
    check(vocab["written"] == len(VOCABULARY), f"the vocabulary became {vocab}")
    return conversion_outcome(found, f"{vocab['written']} rows, ready for transformers")


def _verify(folder: Path, words: Sequence[str]) -> StepOutcome:
    found = run_prep(folder, words)
    nbytes = sum(path.stat().st_size for path in (folder / LEARNED).glob("*.safetensors"))
    return StepOutcome(f"{found['tensors']} tensors, {found['values']:,} values: 0 bits changed", nbytes)
