"""The options of the commands that read no checkpoint: report, recipes, docs, env, demo and check-family.

`options.py` describes the fields. This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from prepcli.core.option_spec import OptionSpec, PathLike

DEMO_FOLDER = Path("prep-demo")


class ReportOptions(TypedDict):
    """Arguments of the function `report` with an option on the command line."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write the page to FILE. Default: report.html in RUN, or here if RUN is a URL.",
            "The HTML file. Default: `report.html` in the folder of the first run.",
        ),
    ]


class RecipesOptions(TypedDict):
    """Options of `prep recipes`."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Copy to FILE. Default: NAME.toml.",
            "File of the copy. Default: the recipe's name with the suffix .toml.",
        ),
    ]


class DocsOptions(TypedDict):
    """Options of `prep docs`."""

    path: Annotated[
        bool,
        OptionSpec(
            None,
            "Print the path of the page instead of its text.",
            "Return the path of the page instead of its text. Default: False.",
            default=False,
        ),
    ]


class EnvOptions(TypedDict):
    """Options of `prep env`."""

    devices: Annotated[
        bool,
        OptionSpec(
            None,
            "Import jax and list its devices.",
            "Import jax and list its devices. Default: False.",
            default=False,
        ),
    ]


class DemoOptions(TypedDict):
    """Options of `prep demo`."""

    out: Annotated[
        PathLike,
        OptionSpec(
            "FOLDER",
            "Work in FOLDER.",
            'Folder of the demo. Default: "prep-demo".',
            default=DEMO_FOLDER,
        ),
    ]


class CheckFamilyOptions(TypedDict):
    """Options of `prep check-family`."""

    check: Annotated[
        Sequence[str],
        OptionSpec(
            "NAME",
            "Run only this check. Repeatable.",
            "Names of the checks to run. Default: all.",
            default=(),
        ),
    ]
