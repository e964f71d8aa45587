"""A job of `prep launch`: its command and options, the environment of its processes, lines of scripts, and YAML.

The functions do no I/O. Every start of `prep` reads this module and the modules of the engines.
"""

from __future__ import annotations

import math
import re
import shlex
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, TypedDict

from prepcli.core.errors import STOPPED, Option, Text, text, usage_error
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.core.option_spec import NonNegativeInt, PathLike, PositiveInt, flag, option

if TYPE_CHECKING:
    from yaml import MappingNode, SafeDumper, ScalarNode, SequenceNode

TRAIN = "train"
TOKENIZE = "tokenize"
# Commands that compute on one mesh of all devices of a job. Their processes connect to process 0.
MESH_COMMANDS = (TRAIN, "eval", "generate")
# Restarts of a job that exits with 75 each time.
MAX_RESTARTS = 100
DEFAULT_GRACE_S = 120
# Seconds until the processes of a recipe without `cluster.heartbeat_timeout` notice a lost one.
HEARTBEAT_TIMEOUT_S = 60.0
# Pattern of the exit codes after which the same command resumes. 75: stopped by a signal, or because another
# process was lost. 131 to 159: killed by a signal. 130 is absent: it means Ctrl-C (SIGINT).
RESTARTABLE = "75 | 13[1-9] | 14? | 15?"
# The same codes, for engines with lists.
RESTARTABLE_CODES = (STOPPED, *range(131, 160))
# Sentence in the head of scripts for clouds.
NOT_RUN = "The authors of prep have not run this file on a real cloud."

# Position in the help of options of several engines: after the options of one engine.
_COMMON_POSITION = 20

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# RFC 1035, short enough for the suffixes of pods.
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
# Keys that no YAML parser takes for another type. YAML 1.1 takes `y` and `n` for booleans.
PLAIN_KEY = re.compile("[A-Za-z][-A-Za-z0-9_./]+")


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
            _check_no_null("a word after `--`", word)

    @property
    def has_mesh(self) -> bool:
        """Whether the processes of the command compute together on one mesh."""
        return self.name in MESH_COMMANDS

    @property
    def writes_buckets(self) -> bool:
        """Whether `--out` may be a URL."""
        return self.name != TOKENIZE

    @property
    def recipe_name(self) -> str:
        """File name of the recipe, or an empty text."""
        return PurePosixPath(self.recipe).name

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the command line after `prep`."""
        recipe = (self.recipe,) if self.recipe else ()
        return (self.name, *recipe, *self.arguments)

    @property
    def title(self) -> str:
        """The command and its first word, for a comment, e.g. `prep save-init llama-13b`."""
        return " ".join(["prep", *self.words[:2]])

    def line(self, recipe: str) -> str:
        """Return the shell command with another path of the recipe, which the caller has quoted."""
        words = [shlex.join(["prep", self.name]), *([recipe] if self.recipe else [])]
        return " ".join([*words, *map(shlex.quote, self.arguments)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """A command for one or several processes.

    Attributes:
        command: The command.
        name: Name of the job.
        setup: Shell lines before the command.
        env: Environment variables.
        max_restarts: Maximal number of restarts after exit code 75 or a kill.
        recipe_text: Text of the recipe, for scripts with a copy of it.
        num_slices: Number of TPU slices. Each has an equal part of the nodes.
        heartbeat_timeout_s: Seconds until the processes notice a lost one.
    """

    command: LaunchedCommand
    name: str
    setup: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    max_restarts: int = MAX_RESTARTS
    recipe_text: str = ""
    num_slices: int = 1
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S

    def __post_init__(self) -> None:
        """Raise UsageError if a shell script cannot contain the texts."""
        check_texts(job_name=self.name, setup=self.setup)
        for name, value in self.env:
            if not _VARIABLE.fullmatch(name):
                why = "a name has letters, digits and underscores"
                hint = text("{}", Option("env", "KEY=VALUE"))
                raise usage_error(f"`{name}` is an invalid name of a variable", why, hint)
            _check_no_null(text("{}", Option("env", name)), value)

    @property
    def environment_lines(self) -> list[str]:
        """The lines for the variables and the setup."""
        return [*(f"export {name}={shlex.quote(value)}" for name, value in self.env), *self.setup]


class JobOptions(TypedDict):
    """Environment of the processes of a job."""

    env: Annotated[
        Sequence[str],
        option(
            "KEY=VALUE",
            "Set an environment variable. Repeatable.",
            default=(),
            position=_COMMON_POSITION + 1,
        ),
    ]


class SubmitOptions(JobOptions):
    """Options of the targets with a file to write and submit."""

    job_name: Annotated[
        str | None,
        option(
            "NAME", "Name the job. Default: by the recipe or command.", position=_COMMON_POSITION
        ),
    ]
    out: Annotated[
        PathLike | None,
        option("FILE", "Write to FILE. Default: stdout.", position=_COMMON_POSITION + 2),
    ]
    submit: Annotated[bool, flag("Submit the job.", position=_COMMON_POSITION + 2)]


class ScriptOptions(SubmitOptions):
    """Options of targets with a shell script."""

    setup: Annotated[
        Sequence[str],
        option(
            "LINE",
            "Run LINE before the command. Repeatable.",
            default=(),
            position=_COMMON_POSITION + 2,
        ),
    ]


class RestartOptions(TypedDict):
    """Limit of restarts of a job."""

    max_restarts: Annotated[
        NonNegativeInt,
        option(
            "N",
            "Restart at most N times after a stop or a kill.",
            default=MAX_RESTARTS,
            position=_COMMON_POSITION + 2,
        ),
    ]


class NodeOptions(TypedDict):
    """The nodes of a job with one process each."""

    nodes: Annotated[
        PositiveInt, option("N", "Use N nodes, with a process each.", default=1, position=2)
    ]
    devices_per_node: Annotated[
        PositiveInt | None, option("N", "Use N devices of each node.", position=2)
    ]
    cpus: Annotated[
        PositiveInt | None,
        option("N", "Use N CPU cores of each node.", position=4),
    ]
    mem: Annotated[str | None, option("SIZE", "Use SIZE memory of each node.", position=4)]


class GraceOptions(TypedDict):
    """The time between a signal and the end of a job."""

    grace: Annotated[
        PositiveInt,
        option(
            "SECONDS",
            "Stop and save SECONDS before the job is killed.",
            default=DEFAULT_GRACE_S,
            position=6,
        ),
    ]


def parse_env(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the names and values of `KEY=VALUE` texts. Raise UsageError for a text without `=`."""
    variables: list[tuple[str, str]] = []
    for variable in texts:
        name, separator, value = variable.partition("=")
        if not separator:
            what = text("{} has no value", Option("env", variable))
            hint = text("{}", Option("env", f"{variable}=VALUE"))
            raise usage_error(what, "a variable is KEY=VALUE", hint)
        variables.append((name, value))
    return tuple(variables)


def check_label(name: str) -> None:
    """Raise UsageError for an invalid name of a job in Google Cloud or Kubernetes."""
    if not _LABEL.fullmatch(name):
        why = "at most 40 lower-case letters, digits and hyphens, the first of them a letter"
        hint = text("{}", Option("job_name", as_label(name)))
        raise usage_error(f"`{name}` is an invalid name of a job", why, hint)


def as_label(name: str) -> str:
    """Return a name as a valid label of Google Cloud and Kubernetes, e.g. `My run` -> `my-run`."""
    hyphenated = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = hyphenated if hyphenated[:1].isalpha() else f"prep-{hyphenated}"
    # The cut may fall on a hyphen, with which no label ends.
    return label[:40].rstrip("-")


def check_texts(**options: str | Sequence[str] | None) -> None:
    """Raise UsageError for an option whose value has a line break or a null character."""
    for name, value in options.items():
        for line in [value] if isinstance(value, str) else value or ():
            check_text(text("{}", Option(name)), line)


def check_text(name: Text | str, value: str) -> None:
    """Raise UsageError for a text with a line break or a null character. `name` is its option or argument."""
    _check_no_null(name, value)
    # `splitlines` drops a last line break: "a\n" is one line for it.
    if len(value.splitlines()) > 1 or value.endswith(("\n", "\r")):
        what = text("{} has more than one line", name)
        raise usage_error(what, repr(value), text("pass one line per {}", name))


def _check_no_null(name: Text | str, value: str) -> None:
    if "\0" in value:
        raise usage_error(text("{} has a null character", name), repr(value), "remove it")


def comment(text: str) -> str:
    """Return a text as one comment line. Bytes of paths without UTF-8 are escaped, because YAML is UTF-8."""
    valid = text.encode("utf-8", "backslashreplace").decode()
    return f"# {' '.join(valid.split())}"


class _Template(string.Template):
    """Template with `@name` for a value, because scripts have their own `$name`."""

    delimiter = "@"


def fill_template(template: str, **values: object) -> str:
    """Return a script with values in place of `@name`. A list of lines fills the line of its name, or removes it."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        texts[name] = str(value)
        if isinstance(value, list):
            texts[name] = "".join(f"{line}\n" for line in value)
            template = template.replace(f"@{name}\n", f"@{{{name}}}")
    return _Template(template).substitute(texts)


def yaml_text(documents: Iterable[JsonObject]) -> str:
    """Return mappings as YAML documents in block style.

    All strings are quoted or literal blocks. PyYAML would leave e.g. `1e3` plain, and the parser
    of Kubernetes would take it for a number.
    """
    import yaml

    return yaml.dump_all(
        documents,
        Dumper=_dumper_class(),
        sort_keys=False,
        allow_unicode=True,
        # Folded lines would be hard to read in a manifest.
        width=math.inf,
    )


@cache
def _dumper_class() -> type[SafeDumper]:
    """Return a dumper with quoted strings, literal blocks for scripts, and without aliases."""
    # Every start of `prep` reads this module, and most commands write no YAML.
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            # A dict in two places, such as the requests and limits of resources, is written twice.
            return True

    Dumper.add_representer(str, _text_node)
    Dumper.add_representer(list, _list_node)
    Dumper.add_representer(dict, _object_node)
    return Dumper


def _text_node(dumper: SafeDumper, value: str) -> ScalarNode:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{value[max(error.start - 20, 0) : error.end]!a} is not UTF-8"
        raise usage_error(what, "YAML is UTF-8", "rename the file") from None
    lines = value.split("\n")
    # Other line breaks than "\n" do not survive in a literal block.
    style = "|" if len(lines) > 1 and all(line.isprintable() for line in lines) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


def _list_node(dumper: SafeDumper, values: list[JsonValue]) -> SequenceNode:
    node = dumper.represent_list(values)
    # Numbers in one line
    node.flow_style = bool(values) and all(isinstance(value, int) for value in values)
    return node


def _object_node(dumper: SafeDumper, mapping: JsonObject) -> MappingNode:
    node = dumper.represent_dict(mapping)
    for key, _ in node.value:
        if PLAIN_KEY.fullmatch(key.value):
            # PyYAML still quotes the words that it takes for other types, such as `null`.
            key.style = None
    return node
