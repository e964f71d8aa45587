"""Invalid recipes, and the message of each: `recipe_errors.txt` has the cases, and this module writes their messages.

A case is a title, the lines that replace lines of a valid recipe, overrides, and the message.

    python -m tests.golden.make_recipe_errors
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import PrepError
from trainer.recipe.loading import load_recipe

FILE = Path(__file__).with_name("recipe_errors.txt")
GOOD = """\
mesh = "1,2,4"
[model]
path = "m-init"
[data]
type = "text"
path = "train.txt"
seq_length = 8
[batch]
size = 4
[optimizer]
lr = 1e-3
[train]
steps = 20
"""


@dataclass(frozen=True)
class InvalidRecipe:
    """A case of the file: the lines of the recipe without `- `, the lines instead of them, and overrides."""

    title: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    overrides: tuple[str, ...]
    message: str

    @property
    def text(self) -> str:
        """The text of the recipe. Lines are added at the end if none are removed."""
        old, new = ("".join(f"{line}\n" for line in lines) for lines in (self.removed, self.added))
        assert old in GOOD, self.title
        return GOOD.replace(old, new, 1) if old else GOOD + new

    def to_block(self, message: str) -> str:
        """Return the lines of the file with a message."""
        lines = [f"# {self.title}"]
        for sign, part in (("-", self.removed), ("+", self.added), ("=", self.overrides)):
            lines += [f"{sign} {line}" for line in part]
        return "\n".join([*lines, message]) + "\n"


def read_cases() -> list[InvalidRecipe]:
    """Return the cases of the file."""
    cases: list[InvalidRecipe] = []
    for block in FILE.read_text("utf-8").split("\n\n"):
        title, *lines = block.strip("\n").split("\n")
        parts: dict[str, list[str]] = {"-": [], "+": [], "=": []}
        while len(lines) > 1:
            line = lines.pop(0)
            parts[line[0]].append(line[2:])
        removed, added, overrides = map(tuple, parts.values())
        cases.append(InvalidRecipe(title.removeprefix("# "), removed, added, overrides, lines[0]))
    return cases


def message_of(case: InvalidRecipe) -> str:
    """Return the message of loading a recipe from the current folder."""
    Path("x.toml").write_text(case.text, "utf-8")
    try:
        load_recipe(Path("x.toml"), case.overrides)
    except PrepError as error:
        return error.message
    return "no error"


if __name__ == "__main__":
    blocks: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for case in read_cases():
            blocks.append(case.to_block(message_of(case)))
    FILE.write_text("\n".join(blocks), "utf-8")
