"""The command of `prep` in a job. The functions do no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Text, text, usage_error

TRAIN = "train"
TOKENIZE = "tokenize"
# Commands that compute on one mesh of all devices of a job. Their processes connect to process 0.
MESH_COMMANDS = (TRAIN, "eval", "generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedCommand:
    """A command of `prep` with its words.

    Attributes:
        name: Name of the command, e.g. `save-init`.
        recipe: Recipe of the command, as the processes see it. Empty if it has none.
        arguments: Words after the name, or after the recipe.
        has_shares: Whether `--processes` divides the work of the command.
        writes_output: Whether the command writes a checkpoint or a run to `out`.
        overrides: Values of `--set`.
        mesh: Value of `--mesh`, or None.
        out: Value of `--out`, or None.
    """

    name: str
    recipe: str = ""
    arguments: tuple[str, ...] = ()
    has_shares: bool = False
    writes_output: bool = False
    overrides: tuple[str, ...] = ()
    mesh: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if a shell script cannot contain the words."""
        check_text("RECIPE", self.recipe)
        for word in self.arguments:
            check_no_null("a word after `--`", word)

    @property
    def has_mesh(self) -> bool:
        """Whether the processes of the command compute together on one mesh."""
        return self.name in MESH_COMMANDS

    @property
    def writes_buckets(self) -> bool:
        """Whether `--out` may be a URL."""
        return self.name != TOKENIZE

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the command line after `prep`."""
        return self.words_with_recipe(self.recipe)

    @property
    def title(self) -> str:
        """The command and its first word, for a comment, e.g. `prep save-init llama-13b`."""
        return " ".join(["prep", *self.words[:2]])

    def words_with_recipe(self, recipe: str) -> tuple[str, ...]:
        """Return the words with another path of the recipe."""
        recipe_words = (recipe,) if self.recipe else ()
        return (self.name, *recipe_words, *self.arguments)


def check_process_count(command: LaunchedCommand, count: int, hint: Text | str) -> None:
    """Check the number of processes of a command.

    Args:
        command: The command.
        count: Number of processes.
        hint: Option for one process.

    Raises:
        UsageError: Every process would do the whole work of the command.
    """
    if count > 1 and not (command.has_mesh or command.has_shares):
        why = f"each of the {count} processes would repeat the whole work"
        raise usage_error(f"`prep {command.name}` runs in one process", why, hint)


def check_text(name: Text | str, value: str) -> None:
    """Raise UsageError for a text with a line break or a null character.

    Args:
        name: Option or argument of the text, for the error.
        value: The text.
    """
    check_no_null(name, value)
    # `splitlines` drops a last line break: "a\n" is one line for it.
    if len(value.splitlines()) > 1 or value.endswith(("\n", "\r")):
        what = text("{} has more than one line", name)
        raise usage_error(what, repr(value), text("pass one line per {}", name))


def check_no_null(name: Text | str, value: str) -> None:
    """Raise UsageError for a text with a null character."""
    if "\0" in value:
        raise usage_error(text("{} has a null character", name), repr(value), "remove it")
