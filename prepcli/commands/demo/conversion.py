"""First half of the demo: pad, convert, kill and resume a conversion, reshard, export and compare."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Sequence
from pathlib import Path

from prepcli.commands.demo.steps import (
    MAX_KILL_TRIES,
    DemoStep,
    StepOutcome,
    check,
    conversion_outcome,
    list_files,
    never_killed_error,
    partial_path,
    remove_output,
    retry_note,
    run_and_kill,
    run_prep,
)
from prepcli.commands.demo.tiny_model import VOCABULARY, write_tiny_model
from prepcli.core.formatting import format_bytes
from prepcli.engine.journal import unseal_line
from prepcli.execution.staging import JOURNAL_STEM, WORK_FOLDER

MODEL = "tiny"
PADDED = "tiny-padded"
INIT = "tiny-padded-init"
UNBROKEN = "unbroken"
RESHARDED = "tiny-padded-1x2x4"
EXPORTED = "tiny-hf"
OUTPUTS = (MODEL, PADDED, INIT, UNBROKEN, RESHARDED, EXPORTED)
# A small budget yields many small steps, and so many moments for a kill.
SAVE_INIT_ARGS = ("save-init", PADDED, "--mesh", "1,1,1", "--memory", "32MiB")


def conversion_steps() -> tuple[DemoStep, ...]:
    """Return the steps from a model with an odd vocabulary to eight devices and back."""
    return (
        DemoStep("make a tiny GPT-Neo", (), _make_model),
        DemoStep("pad its vocabulary", ("pad-vocab", MODEL, "--multiple", "8"), _pad_vocab),
        DemoStep("save an init, kill -9", SAVE_INIT_ARGS, _kill_conversion),
        DemoStep("resume the same command", SAVE_INIT_ARGS, _resume_conversion),
        DemoStep("convert without a kill", (*SAVE_INIT_ARGS, "--out", UNBROKEN), _compare_outputs),
        DemoStep("reshard to 8 devices", ("reshard", INIT, "--mesh", "1,2,4"), _reshard_output),
        DemoStep("export to Hugging Face", ("export", RESHARDED), _export_model),
        DemoStep("verify against the start", ("verify", EXPORTED, MODEL), _verify_export),
    )


def _make_model(folder: Path, _args: Sequence[str]) -> StepOutcome:
    nbytes = write_tiny_model(folder / MODEL)
    files = sorted((folder / MODEL).glob("*.safetensors"))
    return StepOutcome(f"{len(VOCABULARY)} words, {len(files)} files", nbytes)


def _pad_vocab(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    vocab = report["vocab"]
    check(
        vocab["true"] == len(VOCABULARY) and vocab["padded"] % 8 == 0,
        f"the vocabulary became {vocab}",
    )
    return conversion_outcome(report, f"{vocab['true']} -> {vocab['padded']} rows")


def _kill_conversion(folder: Path, args: Sequence[str]) -> StepOutcome:
    """Kill the command while the output is partly written.

    Try again if the command ended before.
    """
    unfinished = partial_path(folder / INIT)
    for tries in range(1, MAX_KILL_TRIES + 1):
        remove_output(folder / INIT)
        is_last = tries == MAX_KILL_TRIES
        if (
            run_and_kill(folder, args, lambda is_last=is_last: _should_kill(unfinished, is_last))
            and unfinished.exists()
        ):
            durable = _durable_nbytes(unfinished)
            share = f"{durable / _data_nbytes(unfinished):.0%}"
            text = (
                f"killed at {share}, {format_bytes(durable)} durable; no {INIT}{retry_note(tries)}"
            )
            return StepOutcome(text, durable)
    raise never_killed_error()


def _should_kill(unfinished: Path, is_last: bool) -> bool:
    """Return whether to kill the command now: some bytes are durable. The last try only needs bytes in data files."""
    return _durable_nbytes(unfinished) > 0 or (is_last and _data_nbytes(unfinished) > 0)


def _data_nbytes(unfinished: Path) -> int:
    """Return the size of the data files, or 0 once the output has its final name."""
    try:
        return sum(path.stat().st_size for path in unfinished.glob("d/*"))
    except FileNotFoundError:
        return 0


def _durable_nbytes(unfinished: Path) -> int:
    """Return the number of durable bytes in the journal. Its last line may be cut short."""
    try:
        # [1:-1] drops the header, and what follows the last line break: an empty text or a torn line.
        lines = (unfinished / WORK_FOLDER / f"{JOURNAL_STEM}.0").read_bytes().split(b"\n")[1:-1]
    except FileNotFoundError:
        return 0
    contents = [content for line in lines if (content := unseal_line(line)) is not None]
    return max((json.loads(content)["done"] for content in contents), default=0)


def _resume_conversion(folder: Path, args: Sequence[str]) -> StepOutcome:
    durable_nbytes = _durable_nbytes(partial_path(folder / INIT))
    report = run_prep(folder, args)
    resumed = report["bytes"]["resumed"]
    written = report["bytes"]["written"]
    check(
        resumed == durable_nbytes,
        f"{durable_nbytes:,} bytes were durable, but it resumed from {resumed:,}",
    )
    return conversion_outcome(
        report, f"resumed from {format_bytes(resumed)} of {format_bytes(resumed + written)}"
    )


def _compare_outputs(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    names = [list_files(folder / name) for name in (INIT, UNBROKEN)]
    check(names[0] == names[1], f"{INIT} and {UNBROKEN} have different files")
    # shallow=False compares contents. The default trusts equal sizes and times.
    _, differing, unreadable = filecmp.cmpfiles(
        folder / INIT, folder / UNBROKEN, names[0], shallow=False
    )
    check(
        not differing and not unreadable,
        f"different files in {INIT}: {', '.join([*differing, *unreadable])}",
    )
    return conversion_outcome(
        report, f"{len(names[0])} files, byte for byte equal to the killed run"
    )


def _reshard_output(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    return conversion_outcome(
        report, f"{report['mesh']['from']} -> {report['mesh']['to']}, {report['chunks']} chunks"
    )


def _export_model(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    vocab = report["vocab"]
    check(vocab["written"] == len(VOCABULARY), f"the vocabulary became {vocab}")
    return conversion_outcome(report, f"{vocab['written']} true rows")


def _verify_export(folder: Path, args: Sequence[str]) -> StepOutcome:
    report = run_prep(folder, args)
    before = folder / MODEL
    after = folder / EXPORTED
    is_tokenizer_equal = filecmp.cmp(
        before / "tokenizer.json", after / "tokenizer.json", shallow=False
    )
    configs = [json.loads((model / "config.json").read_bytes()) for model in (before, after)]
    check(is_tokenizer_equal and configs[0] == configs[1], "the settings differ from the start")
    nbytes = 0
    for model in (before, after):
        nbytes += sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return StepOutcome(
        f"{report['tensors']} tensors, {report['values']:,} values: 0 bits changed", nbytes
    )
