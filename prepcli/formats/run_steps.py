"""Steps of a training run: the folders named by a step number in a run's folder.

In an object store, whose folders are only prefixes of names, a step exists if its manifest does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from prepcli.formats.manifest import MANIFEST_FILE, STATE_ITEM
from prepcli.formats.orbax import METADATA_FILE
from prepcli.formats.untrusted import unreadable_error

RECIPE_FILE = "recipe.toml"  # of each run
STEP_NAME = re.compile("0|[1-9][0-9]{0,17}")
LISTED_MANIFEST = re.compile(f"({STEP_NAME.pattern})/{re.escape(MANIFEST_FILE)}")


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / str(step)


def saved_steps(run: Path) -> list[int]:
    """Return the steps with complete checkpoints, ascending; an empty list if the run does not exist."""
    try:
        names = [name for name in os.listdir(run) if STEP_NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable_error(run, error) from error
    return sorted(int(name) for name in names if _is_step(run / name))


def _is_step(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() and (folder / STATE_ITEM / METADATA_FILE).is_file()


def listed_steps(paths: Iterable[str]) -> list[int]:
    """Return the steps with a manifest among the paths of a run's files, ascending."""
    matches = (LISTED_MANIFEST.fullmatch(path) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def listed_step(path: str) -> int | None:
    """Return the step of a path in a run; None for a file of the run itself."""
    name, slash, _ = path.partition("/")
    return int(name) if slash and STEP_NAME.fullmatch(name) else None
