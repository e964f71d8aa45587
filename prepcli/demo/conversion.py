"""The first half of the demo: pad, convert and be killed at it, lay out anew, go back, compare."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Sequence
from pathlib import Path

from prepcli.console.formatting import bytes_text
from prepcli.demo.tasks import Outcome, Task, check, converted, files_of, killed, partial, prep, remove
from prepcli.demo.tiny_model import VOCABULARY, write_tiny_model
from prepcli.engine.journal import unsealed
from prepcli.errors import PrepError
from prepcli.execution.staging import JOURNAL, WORK

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
TRIES = 5  # a machine may be too fast


def tasks() -> tuple[Task, ...]:
    """From an odd vocabulary to 8 devices, and back to where it came from."""
    return (
        Task("make a tiny GPT-Neo", (), _make),
        Task("pad its vocabulary", ("pad-vocab", MODEL, "--multiple", "8"), _pad),
        Task("save an init, kill -9", SAVE, _kill),
        Task("the same again", SAVE, _resume),
        Task("one that is not killed", (*SAVE, "--out", UNBROKEN), _compare),
        Task("lay out for 8 devices", ("reshard", INIT, "--mesh", "1,2,4"), _reshard),
        Task("go back", ("export", RESHARDED), _export),
        Task("compare with the start", ("verify", EXPORTED, MODEL), _verify),
    )


def _make(folder: Path, _: Sequence[str]) -> Outcome:
    nbytes = write_tiny_model(folder / MODEL)
    files = sorted((folder / MODEL).glob("*.safetensors"))
    return Outcome(f"{len(VOCABULARY)} words, {len(files)} files", nbytes)


def _pad(folder: Path, words: Sequence[str]) -> Outcome:
    found = prep(folder, words)
    vocab = found["vocab"]
    check(vocab["true"] == len(VOCABULARY) and vocab["padded"] % 8 == 0, f"the vocabulary became {vocab}")
    return converted(found, f"{vocab['true']} -> {vocab['padded']} rows")


def _kill(folder: Path, words: Sequence[str]) -> Outcome:
    """Kill the command while the output is partly written; try again if the run was over before it."""
    unfinished = partial(folder / INIT)
    for tries in range(1, TRIES + 1):
        remove(folder / INIT)
        is_last = tries == TRIES
        if killed(folder, words, lambda is_last=is_last: _is_midway(unfinished, is_last)) and unfinished.exists():
            durable, again = _durable(unfinished), f" (try {tries}: it was too fast)" if tries > 1 else ""
            text = f"killed at {durable / _total(unfinished):.0%}, {bytes_text(durable)} durable; no {INIT}{again}"
            return Outcome(text, durable)
    raise PrepError(f"the run was over {TRIES} times before it could be killed", "this machine is too fast")


def _is_midway(unfinished: Path, is_last: bool) -> bool:
    """Whether first bytes are durable; on the last try, whether the data files exist."""
    return _durable(unfinished) > 0 or (is_last and _total(unfinished) > 0)


def _total(unfinished: Path) -> int:
    """Return the size of the data files; 0 once the output has its final name."""
    try:
        return sum(path.stat().st_size for path in unfinished.glob("d/*"))
    except FileNotFoundError:
        return 0


def _durable(unfinished: Path) -> int:
    """Return the bytes that the journal promises; its last line may be cut short."""
    try:
        lines = (unfinished / WORK / f"{JOURNAL}.0").read_bytes().split(b"\n")[1:-1]
    except FileNotFoundError:
        return 0
    contents = [content for line in lines if (content := unsealed(line)) is not None]
    return max((json.loads(content)["done"] for content in contents), default=0)


def _resume(folder: Path, words: Sequence[str]) -> Outcome:
    promised = _durable(partial(folder / INIT))
    found = prep(folder, words)
    resumed, written = found["bytes"]["resumed"], found["bytes"]["written"]
    check(resumed == promised, f"{promised:,} bytes were durable, it went on from {resumed:,}")
    return converted(found, f"went on from {bytes_text(resumed)} of {bytes_text(resumed + written)}")


def _compare(folder: Path, words: Sequence[str]) -> Outcome:
    found = prep(folder, words)
    names = [files_of(folder / name) for name in (INIT, UNBROKEN)]
    check(names[0] == names[1], f"{INIT} and {UNBROKEN} have different files")
    _, differing, unread = filecmp.cmpfiles(folder / INIT, folder / UNBROKEN, names[0], shallow=False)
    check(not differing and not unread, f"not the same in {INIT}: {', '.join([*differing, *unread])}")
    return converted(found, f"{len(names[0])} files, byte for byte those of the killed one")


def _reshard(folder: Path, words: Sequence[str]) -> Outcome:
    found = prep(folder, words)
    return converted(found, f"{found['mesh']['from']} -> {found['mesh']['to']}, {found['chunks']} chunks")


def _export(folder: Path, words: Sequence[str]) -> Outcome:
    found = prep(folder, words)
    vocab = found["vocab"]
    check(vocab["written"] == len(VOCABULARY), f"the vocabulary became {vocab}")
    return converted(found, f"{vocab['written']} rows again")


def _verify(folder: Path, words: Sequence[str]) -> Outcome:
    found = prep(folder, words)
    before, after = folder / MODEL, folder / EXPORTED
    kept = filecmp.cmp(before / "tokenizer.json", after / "tokenizer.json", shallow=False)
    configs = [json.loads((each / "config.json").read_bytes()) for each in (before, after)]
    check(kept and configs[0] == configs[1], "the settings are not those of the start")
    nbytes = sum(path.stat().st_size for each in (before, after) for path in each.glob("*.safetensors"))
    return Outcome(f"{found['tensors']} tensors, {found['values']:,} values: 0 bits changed", nbytes)
