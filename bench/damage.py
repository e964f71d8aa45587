"""Damage the files of a killed run at random: flip bits, cut off or append bytes."""

from __future__ import annotations

import random
from pathlib import Path

DATA_SHARE, JOURNAL_SHARE = 0.5, 0.25  # shares of the cases; the rest damages any other file
MAX_ADDED_NBYTES = 100_000


def damage_file(folder: Path, rng: random.Random) -> str:
    """Damage one file under a folder; return what was done, or "" if no file has bytes."""
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
    return journals if kind < DATA_SHARE + JOURNAL_SHARE else [path for path in files if path not in journals]


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
