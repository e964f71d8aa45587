"""Steps of a training run: the folders named by a step number in a run's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from prepcli.formats.manifest import MANIFEST_FILE, STATE_ITEM
from prepcli.formats.orbax import METADATA_FILE
from prepcli.formats.untrusted import unreadable_error


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / str(step)


def saved_steps(run: Path) -> list[int]:
    """Return the steps with complete checkpoints, ascending; an empty list if the run does not exist."""
    try:
        names = [name for name in os.listdir(run) if re.fullmatch("0|[1-9][0-9]{0,17}", name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable_error(run, error) from error
    return sorted(int(name) for name in names if _is_step(run / name))


def _is_step(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() and (folder / STATE_ITEM / METADATA_FILE).is_file()
