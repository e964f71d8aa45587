"""`prep demo`: the whole way of a checkpoint, on a tiny model and offline, by the commands that a user types."""

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError, usage
from prepcli.staging import JOURNAL, WORK
from prepcli.tiny_model import VOCABULARY, write_tiny_model
from prepcli.ui import Report, Ui, table
from prepcli.units import bytes_text, seconds_text

MARKER = ".made-by-prep-demo"
MODEL, PADDED, INIT, UNBROKEN, RESHARDED, EXPORTED = (
    "tiny",
    "tiny-padded",
    "tiny-padded-init",
    "unbroken",
    "tiny-padded-1x2x4",
    "tiny-hf",
)
MADE = (MODEL, PADDED, INIT, UNBROKEN, RESHARDED, EXPORTED)
SAVE = ("save-init", PADDED, "--mesh", "1,1,1", "--memory", "32MiB")  # little memory: many small steps to be killed at
KILL_AT = (0.6, 0.4, 0.2, 0.05, 0.0)  # parts written; earlier from try to try, should a machine be too fast
LOOK_EVERY_S = 0.0005


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it went; `command` as a user would type it, in the demo's folder."""

    step: str
    command: str
    seconds: float
    bytes: int
    peak: int  # bytes of memory, 0 where no command told
    result: str
    ok: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: str
    nbytes: int
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    """A step to be done: `work` is given the demo's folder and the words of the command; PrepError if it goes wrong."""

    title: str
    words: tuple[str, ...]
    work: Callable[[Path, Sequence[str]], _Outcome]


def demo(out: Path, ui: Ui) -> Report:
    """Make a tiny model in the folder `out`, take it all the way and back, and check each step.

    A folder that an earlier demo made is taken again. The report carries an error if a check failed.
    """
    _prepare(out)
    tasks = _tasks()
    ui.note(f"offline, {len(tasks)} steps; to repeat one yourself: cd {shlex.quote(str(out))}")
    steps: list[Step] = []
    for number, task in enumerate(tasks, 1):
        command = shlex.join(["prep", *task.words]) if task.words else ""
        ui.note(f"[{number}/{len(tasks)}] {task.title}")
        if command:
            ui.note(f"      $ {command}")
        steps.append(_done(task, command, out))
        ui.note(f"      {_cell(steps[-1])} ({seconds_text(steps[-1].seconds)})")
        if not steps[-1].ok:
            break
    return _report(out, steps, len(tasks))


def _tasks() -> tuple[_Task, ...]:
    return (
        _Task("make a tiny GPT-Neo", (), _make),
        _Task("pad its vocabulary", ("pad-vocab", MODEL, "--multiple", "8"), _pad),
        _Task("save an init, kill -9", SAVE, _kill),
        _Task("the same again", SAVE, _resume),
        _Task("one that is not killed", (*SAVE, "--out", UNBROKEN), _compare),
        _Task("lay out for 8 devices", ("reshard", INIT, "--mesh", "1,2,4"), _reshard),
        _Task("go back", ("export", RESHARDED), _export),
        _Task("compare with the start", ("verify", EXPORTED, MODEL), _verify),
    )


def _prepare(out: Path) -> None:
    """A folder for the demo, without what an earlier one made there; usage PrepError if it is somebody else's."""
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        why = f"it has no {MARKER}, so no demo made it"
        raise usage(f"{out} exists and is something else", why, "`prep demo --out NAME`")
    for name in MADE:
        _remove(out / name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrepError(f"cannot make {out}", error.strerror or str(error), "`prep demo --out NAME`") from error
    (out / MARKER).touch()


def _remove(made: Path) -> None:
    """Remove an output, whole or not."""
    for folder in (made, _partial(made)):
        shutil.rmtree(folder, ignore_errors=True)


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _done(task: _Task, command: str, folder: Path) -> Step:
    began = time.monotonic()
    step = Step(task.title, command, 0.0, 0, 0, "", False)
    try:
        outcome = task.work(folder, task.words)
        step = replace(step, bytes=outcome.nbytes, peak=outcome.peak_nbytes, result=outcome.result, ok=True)
    except PrepError as error:
        step = replace(step, result=str(error))
    return replace(step, seconds=round(time.monotonic() - began, 3))


def _report(out: Path, steps: list[Step], count: int) -> Report:
    head = ("step", "seconds", "bytes", "memory", "result")
    text = table([_row(step) for step in steps], head, right=("seconds", "bytes", "memory"))
    fields = {"output": str(out), "steps": [asdict(step) for step in steps]}
    failed = next((step for step in steps if not step.ok), None)
    if failed is None:
        return Report(f"{text}\nall {count} steps are as they should be", fields, "the same with a model of your own")
    what = f"the demo failed at step {len(steps)}: {failed.step}"
    hint = f"`cd {shlex.quote(str(out))} && {failed.command}`" if failed.command else ""
    return Report(text, fields, error=PrepError(what, failed.result, hint))


def _row(step: Step) -> tuple[str, ...]:
    memory = bytes_text(step.peak) if step.peak else "-"
    return step.step, f"{step.seconds:.1f}", bytes_text(step.bytes), memory, _cell(step)


def _cell(step: Step) -> str:
    return step.result if step.ok else f"FAILED: {step.result}"


def _argv(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "prepcli", *words, "--json", "--quiet"]


def _environment() -> dict[str, str]:
    """Nothing here needs the network, so nothing may use it."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def _prep(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run a command in `folder`; its JSON object. PrepError with its message if it fails."""
    done = subprocess.run(_argv(words), cwd=folder, env=_environment(), capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise PrepError(f"prep {words[0]} ended with {done.returncode}", done.stderr.strip()[-200:]) from None
    if done.returncode or not found["ok"]:
        raise PrepError(f"prep {words[0]} ended with {done.returncode}", found["error"]["what"], found["error"]["why"])
    return found


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise PrepError(otherwise)


def _converted(found: dict[str, Any], result: str) -> _Outcome:
    """What a conversion did; PrepError if it took more memory than it was given."""
    memory = found["memory"]
    _check(memory["peak"] <= memory["budget"], f"it took {bytes_text(memory['peak'])} of memory")
    return _Outcome(result, found["bytes"]["written"], found["memory"]["peak"])


def _make(folder: Path, _: Sequence[str]) -> _Outcome:
    nbytes = write_tiny_model(folder / MODEL)
    files = sorted((folder / MODEL).glob("*.safetensors"))
    return _Outcome(f"{len(VOCABULARY)} words, {len(files)} files", nbytes)


def _pad(folder: Path, words: Sequence[str]) -> _Outcome:
    found = _prep(folder, words)
    vocab = found["vocab"]
    _check(vocab["true"] == len(VOCABULARY) and vocab["padded"] % 8 == 0, f"the vocabulary became {vocab}")
    return _converted(found, f"{vocab['true']} -> {vocab['padded']} rows")


def _kill(folder: Path, words: Sequence[str]) -> _Outcome:
    """A real SIGKILL while the output is half written; tried anew, and earlier, if the run was over before it."""
    for tries, share in enumerate(KILL_AT, 1):
        _remove(folder / INIT)
        if _killed_midway(folder, words, share):
            written, total = _written(_partial(folder / INIT))
            durable = _durable(_partial(folder / INIT))
            again = f" (try {tries}: it was too fast)" if tries > 1 else ""
            text = f"killed at {written / total:.0%}, {bytes_text(durable)} durable; no {INIT}{again}"
            return _Outcome(text, written)
    raise PrepError(f"the run was over {len(KILL_AT)} times before it could be killed", "this machine is too fast")


def _killed_midway(folder: Path, words: Sequence[str], share: float) -> bool:
    """Start the command and kill it at the first durable bytes, or once it has written `share` of its output."""
    partial = _partial(folder / INIT)
    process = subprocess.Popen(
        _argv(words), cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while process.poll() is None and not _is_midway(partial, share):
            time.sleep(LOOK_EVERY_S)
    finally:
        process.kill()
        _, told = process.communicate()
    if process.returncode > 0:
        raise PrepError(f"prep {words[0]} ended with {process.returncode}", told.strip()[-200:])
    return process.returncode == -signal.SIGKILL and not (folder / INIT).exists()


def _is_midway(partial: Path, share: float) -> bool:
    written, total = _written(partial)
    return written > 0 and (_durable(partial) > 0 or written >= share * total)


def _written(partial: Path) -> tuple[int, int]:
    """Bytes on disk, and bytes that there will be, of the data files; none once the output has its final name."""
    try:
        found = [path.stat() for path in partial.glob("d/*")]
    except FileNotFoundError:
        return 0, 0
    return sum(file.st_blocks * 512 for file in found), sum(file.st_size for file in found)


def _durable(partial: Path) -> int:
    """Bytes that the journal promises; its last line may be cut short."""
    try:
        lines = (partial / WORK / JOURNAL).read_bytes().split(b"\n")[1:-1]
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["done"] for line in lines), default=0)


def _resume(folder: Path, words: Sequence[str]) -> _Outcome:
    promised = _durable(_partial(folder / INIT))
    found = _prep(folder, words)
    resumed, written = found["bytes"]["resumed"], found["bytes"]["written"]
    _check(resumed == promised, f"{promised:,} bytes were durable, it went on from {resumed:,}")
    return _converted(found, f"went on from {bytes_text(resumed)} of {bytes_text(resumed + written)}")


def _compare(folder: Path, words: Sequence[str]) -> _Outcome:
    found = _prep(folder, words)
    names = [_files(folder / name) for name in (INIT, UNBROKEN)]
    _check(names[0] == names[1], f"{INIT} and {UNBROKEN} have different files")
    _, differing, unread = filecmp.cmpfiles(folder / INIT, folder / UNBROKEN, names[0], shallow=False)
    _check(not differing and not unread, f"not the same in {INIT}: {', '.join([*differing, *unread])}")
    return _converted(found, f"{len(names[0])} files, byte for byte those of the killed one")


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _reshard(folder: Path, words: Sequence[str]) -> _Outcome:
    found = _prep(folder, words)
    return _converted(found, f"{found['mesh']['from']} -> {found['mesh']['to']}, {found['chunks']} chunks")


def _export(folder: Path, words: Sequence[str]) -> _Outcome:
    found = _prep(folder, words)
    vocab = found["vocab"]
    _check(vocab["written"] == len(VOCABULARY), f"the vocabulary became {vocab}")
    return _converted(found, f"{vocab['written']} rows again")


def _verify(folder: Path, words: Sequence[str]) -> _Outcome:
    found = _prep(folder, words)
    before, after = folder / MODEL, folder / EXPORTED
    kept = filecmp.cmp(before / "tokenizer.json", after / "tokenizer.json", shallow=False)
    configs = [json.loads((each / "config.json").read_bytes()) for each in (before, after)]
    _check(kept and configs[0] == configs[1], "the settings are not those of the start")
    nbytes = sum(path.stat().st_size for each in (before, after) for path in each.glob("*.safetensors"))
    return _Outcome(f"{found['tensors']} tensors, {found['values']:,} values: 0 bits changed", nbytes)
