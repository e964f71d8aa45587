"""Damage files at random. As a program, flip bits of finished outputs and read each by every command.

    python -m bench.damage --work FOLDER [--flips 8] [--seed 1] [--subjects init,step] [--max-files N]

The program flips one bit at a time, in every file of each kind of output: inits in all storages, training steps,
exports in all layouts, quantised models, adapters and a step in a bucket. Commands run in this process. A flip is
refused if the command fails, harmless if its result is that of the intact output, and wrong otherwise. Prints a row per
subject and command. `wrong` must be 0. The exit code is 1 if it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.damage_readers import RefusedError, Subject, make_outputs, make_subjects
from prepcli.core.tables import format_table
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.shared_steps import share_steps
from tests.helpers.training_folder import make_training_folder

REFUSED, HARMLESS, WRONG = "refused", "harmless", "wrong"

# Shares of the cases with damaged data files and with damaged notes. All other cases damage some other file.
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
    """Return the files of one kind: data, notes or others, by the shares above."""
    kind = rng.random()
    if kind < DATA_SHARE:
        return [path for path in files if path.suffix == ".safetensors" or path.parent.name == "d"]
    notes = [
        path for path in files if path.parent.name in ("done", "part") or path.name == "packed"
    ]
    return (
        notes
        if kind < DATA_SHARE + JOURNAL_SHARE
        else [path for path in files if path not in notes]
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


def flip_all(
    subject: Subject,
    num_flips: int,
    rng: random.Random,
    on_wrong: Callable[[str], object],
    *,
    max_files: int | None = None,
) -> dict[str, Counter[str]]:
    """Flip bits of every file of a subject, and count the verdicts of each command.

    Args:
        subject: The output. All of its files are intact at the end.
        num_flips: Flips per file.
        rng: Chooses the bits.
        on_wrong: Called with a description of each wrong result.
        max_files: Number of files to flip bits of, drawn at random. None for all.
    """
    expected = {command: read() for command, read in subject.commands.items()}
    verdicts = {command: Counter[str]() for command in subject.commands}
    names = [*subject.files]
    if max_files is not None and max_files < len(names):
        names = rng.sample(names, max_files)
    for name in names:
        data = subject.files[name]
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
    parser.add_argument("--max-files", type=int, help="files per output; default: all")
    parser.add_argument("--subjects", help="names separated by commas; default: all")
    options = parser.parse_args()
    rng, rows, wrong = random.Random(options.seed), [], []
    with damage_folder(options.work) as store:
        subjects = make_subjects(store)
        for name in options.subjects.split(",") if options.subjects else subjects:
            verdicts = flip_all(
                subjects[name], options.flips, rng, wrong.append, max_files=options.max_files
            )
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
