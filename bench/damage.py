"""Random damage to what a killed run left: bits flipped, bytes cut off or added."""

from __future__ import annotations

import random
from pathlib import Path

DATA_SHARE, JOURNAL_SHARE = 0.5, 0.25  # of the cases; the rest is any other file
MAX_ADDED_NBYTES = 100_000


def damage_file(folder: Path, rng: random.Random) -> str:
    """Damage one file below a folder; what was done, empty where no file has bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return ""
    path = rng.choice(_group(files, rng) or files)
    how = rng.choice((_flip, _flip, _cut, _extend))
    how(path, rng)
    return f"{how.__name__[1:]} {path.relative_to(folder)}"


def _group(files: list[Path], draw: random.Random) -> list[Path]:
    """The files of one kind."""
    kind = draw.random()
    if kind < DATA_SHARE:
        return [path for path in files if path.suffix == ".safetensors" or path.parent.name == "d"]
    journals = [path for path in files if path.name.startswith(("journal", "packed"))]
    return journals if kind < DATA_SHARE + JOURNAL_SHARE else [path for path in files if path not in journals]


def _flip(path: Path, draw: random.Random) -> None:
    """Flip a bit."""
    at = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def _cut(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size))


def _extend(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, MAX_ADDED_NBYTES)))
