"""Damage files at random. As a program, flip bits of finished outputs and read each by every command.

    python -m bench.damage --work FOLDER [--flips 8] [--seed 1] [--subjects init,step]

The program flips one bit at a time, in every file of an init, a training step, a Hugging Face folder, an adapter, a
Flax folder, an EasyLM folder and a training step in a bucket. Commands run in this process. A flip is refused if the
command fails, harmless if its result is that of the intact output, and wrong otherwise. Prints a row per subject and
command. `wrong` must be 0. The exit code is 1 if it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.cli.main import main as prep
from prepcli.console.ui import format_table
from prepcli.formats.manifest import MANIFEST_FILE
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.shared_steps import share_steps
from tests.helpers.training_folder import make_training_folder

URL, OBJECTS = "gs://bucket/run", "bucket/run/"
STEP, NEXT_STEP = "2", "3"
OUT = Path("out")
SETTINGS = (
    "mesh=1,1,-1",
    "data.holdout=0",
    "checkpoint.every=1",
    "batch.size=2",
    f"train.steps={NEXT_STEP}",
)
SET = tuple(word for setting in SETTINGS for word in ("--set", setting))
LORA = ("--set", "lora.rank=2", "--set", 'lora.targets=["attn.q"]')
EVAL = ("--data", "text.txt", "--seq-length", "16", "--limit", "2")
REFUSED, HARMLESS, WRONG = "refused", "harmless", "wrong"

# Shares of the cases with damaged data files and with damaged journals. All other cases damage some other file.
DATA_SHARE, JOURNAL_SHARE = 0.5, 0.25
MAX_ADDED_NBYTES = 100_000


def damage_file(folder: Path, rng: random.Random) -> str:
    """Damage one file under a folder, and return what was done, or "" if no file has bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return ""
    path = rng.choice(_candidates(files, rng) or files)
    damage = rng.choice((_flip, _flip, _cut, _extend))
    damage(path, rng)
    return f"{damage.__name__[1:]} {path.relative_to(folder)}"


def _candidates(files: list[Path], rng: random.Random) -> list[Path]:
    """Return the files of one kind: data, journals or others, by the shares above."""
    kind = rng.random()
    if kind < DATA_SHARE:
        return [path for path in files if path.suffix == ".safetensors" or path.parent.name == "d"]
    journals = [path for path in files if path.name.startswith(("journal", "packed"))]
    return (
        journals
        if kind < DATA_SHARE + JOURNAL_SHARE
        else [path for path in files if path not in journals]
    )


def _flip(path: Path, rng: random.Random) -> None:
    """Flip a random bit of a file."""
    offset = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _cut(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


def _extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, MAX_ADDED_NBYTES)))


class RefusedError(Exception):
    """A command ended with an error."""


def run(*words: str, codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run a command, and return its JSON. Raise RefusedError if its exit code is not in `codes`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = prep([*words, "--json"])
    if code not in codes:
        raise RefusedError(out.getvalue())
    return json.loads(out.getvalue())


def _convert(*words: str) -> object:
    """Convert, and return the files of the output without its manifest, which records times of the source."""
    for folder in (OUT, OUT.with_name(f"{OUT}.partial")):
        shutil.rmtree(folder, ignore_errors=True)
    run(*words, "--out", str(OUT))
    return {name: data for name, data in _read_tree(OUT).items() if name != MANIFEST_FILE}


def _read_tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _evaluate(name: str) -> object:
    report = run("eval", name, *EVAL)
    return {key: report[key] for key in ("loss", "perplexity")}


def _verify(name: str) -> object:
    return run("verify", name)["differences"]


@dataclass(frozen=True)
class Subject:
    """An output to damage.

    Attributes:
        files: Its files by name.
        write: Writes a file of it.
        commands: Functions that read it, by the name of the command. Each returns what it computed.
    """

    files: Mapping[str, bytes]
    write: Callable[[str, bytes], object]
    commands: Mapping[str, Callable[[], object]]


def _folder_subject(folder: Path, commands: Mapping[str, Callable[[], object]]) -> Subject:
    def write(name: str, data: bytes) -> None:
        path = folder / name
        times = path.stat()
        path.write_bytes(data)
        # Rotting bits do not change the time of a file.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return Subject(_read_tree(folder), write, commands)


def _model_commands(name: str, convert: str) -> dict[str, Callable[[], object]]:
    return {
        convert: lambda: _convert(convert, name),
        "verify": lambda: _verify(name),
        "eval": lambda: _evaluate(name),
        "merge": lambda: _convert("merge", "adapter", name, "--no-verify"),
    }


def _resume() -> object:
    """Resume a copy of the run at its damaged step, and return the tensors and settings of the next step."""
    shutil.rmtree("resumed", ignore_errors=True)
    shutil.copytree("run", "resumed", copy_function=shutil.copy2)
    run("train", "recipe.toml", "--out", "resumed", *SET)
    return _step_content(_read_tree(Path("resumed", NEXT_STEP)))


def _resume_in_bucket(store: FakeObjectStore) -> object:
    before = dict(store.objects)
    try:
        shutil.rmtree("runs", ignore_errors=True)
        run("train", "recipe.toml", "--out", URL, *SET)
        return _step_content(store.objects_below(f"{OBJECTS}{NEXT_STEP}/"))
    finally:
        store.objects.clear()
        store.objects.update(before)


def _step_content(files: Mapping[str, bytes]) -> object:
    """Return the digests of a step's tensors, its config, and the bytes of its settings."""
    manifest = json.loads(files[MANIFEST_FILE])
    settings = {name: data for name, data in files.items() if "/hf/" in name}
    return {key: manifest[key] for key in ("tensors", "slots", "others", "config")}, settings


def make_outputs() -> None:
    """Write all outputs to the current folder, which has a recipe, a model and its init."""
    run("train", "recipe.toml", "--out", "run", *SET, "--stop-after", STEP, codes=(75,))
    run("train", "recipe.toml", "--out", "lora", *SET, *LORA)
    run("export", "lora", "--out", "adapter")
    run("export", "tiny-init", "--out", "hf")
    run("export", "tiny-init", "--out", "flax", "--layout", "hf-flax")
    run("export", "tiny-init", "--out", "easylm", "--layout", "easylm")
    run("train", "recipe.toml", "--out", URL, *SET, "--stop-after", STEP, codes=(75,))


def make_subjects(store: FakeObjectStore) -> dict[str, Subject]:
    """Return the outputs of `make_outputs` with the commands that read them."""
    bucket_prefix = f"{OBJECTS}{STEP}/"

    def write_object(name: str, data: bytes) -> None:
        store.objects[bucket_prefix + name] = data

    step = _model_commands(f"run/{STEP}", "export")
    bucket = _model_commands(f"{URL}/{STEP}", "export")
    adapter = {
        "merge": lambda: _convert("merge", "adapter", "tiny-init", "--no-verify"),
        "verify": lambda: _verify("adapter"),
    }
    return {
        "init": _folder_subject(Path("tiny-init"), _model_commands("tiny-init", "export")),
        "step": _folder_subject(Path("run", STEP), {**step, "resume": _resume}),
        "hf": _folder_subject(Path("hf"), _model_commands("hf", "save-init")),
        "flax": _folder_subject(Path("flax"), _model_commands("flax", "save-init")),
        "easylm": _folder_subject(Path("easylm"), _model_commands("easylm", "save-init")),
        "adapter": _folder_subject(Path("adapter"), adapter),
        "bucket": Subject(
            store.objects_below(bucket_prefix),
            write_object,
            {**bucket, "resume": lambda: _resume_in_bucket(store)},
        ),
    }


def flip_all(
    subject: Subject, num_flips: int, rng: random.Random, on_wrong: Callable[[str], object]
) -> dict[str, Counter[str]]:
    """Flip bits of every file of a subject, and count the verdicts of each command.

    Args:
        subject: The output. All of its files are intact at the end.
        num_flips: Flips per file.
        rng: Chooses the bits.
        on_wrong: Called with a description of each wrong result.
    """
    expected = {command: read() for command, read in subject.commands.items()}
    verdicts = {command: Counter[str]() for command in subject.commands}
    for name, data in subject.files.items():
        for position in rng.choices(range(8 * len(data)), k=num_flips if data else 0):
            flipped = bytearray(data)
            flipped[position // 8] ^= 1 << position % 8
            subject.write(name, bytes(flipped))
            for command, read in subject.commands.items():
                verdict = _verdict(read, expected[command])
                verdicts[command][verdict] += 1
                if verdict == WRONG:
                    on_wrong(f"bit {position % 8} of byte {position // 8} of {name}, {command}")
        subject.write(name, data)
    return verdicts


def _verdict(read: Callable[[], object], expected: object) -> str:
    try:
        result = read()
    except RefusedError:
        return REFUSED
    return HARMLESS if result == expected else WRONG


@contextlib.contextmanager
def damage_folder(work: Path) -> Iterator[FakeObjectStore]:
    """Enter a new folder with all outputs and an object store, in which commands share compiled steps."""
    work.mkdir(parents=True)
    with contextlib.chdir(work), serve_objects() as store, share_steps():
        os.environ.update(store.environment() | {"HF_HUB_OFFLINE": "1"})
        make_training_folder()
        make_outputs()
        yield store


def main() -> int:
    """Run the program, and return 1 if a flip was accepted with another result."""
    parser = argparse.ArgumentParser(description="Flip bits of outputs.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--flips", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--subjects", help="names separated by commas; default: all")
    options = parser.parse_args()
    rng, rows, wrong = random.Random(options.seed), [], []
    with damage_folder(options.work) as store:
        subjects = make_subjects(store)
        for name in options.subjects.split(",") if options.subjects else subjects:
            verdicts = flip_all(subjects[name], options.flips, rng, wrong.append)
            for command, counts in verdicts.items():
                rows.append(
                    [
                        name,
                        command,
                        *(str(counts[verdict]) for verdict in (REFUSED, HARMLESS, WRONG)),
                    ]
                )
                print(*rows[-1], flush=True)
    print(format_table(rows, ["output", "command", REFUSED, HARMLESS, WRONG]))
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
