"""What a user says of a checkpoint besides where it is: what model it is of, and which part of it is meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prepcli.errors import PrepError

CONFIG = "config.json"
MARK = "::"
FLAX = "flax_params"
OF_A_STATE = ("trainstate", "trainstate_params")
PARTS = (*OF_A_STATE, "params", FLAX)  # EasyLM's names, written before a path as `params::PATH`


@dataclass(frozen=True, slots=True)
class Given:
    """`config`: a config.json, or a folder with one, for checkpoints that have none; `part`: one of PARTS, or empty."""

    config: Path | None = None
    part: str = ""

    def config_file(self, folder: Path, shown: str) -> Path:
        """The config.json that counts: the given one, else that of the folder. PrepError where there is none."""
        path = self.config.expanduser() if self.config else folder
        path = path / CONFIG if path.is_dir() else path
        if self.config is None and not path.is_file():
            hint = f"`--config FOLDER`: one with the model's {CONFIG}"
            raise PrepError(f"{shown} does not say what model it is of", f"there is no {path}", hint)
        return path


NOTHING = Given()


def parted_name(name: str) -> tuple[str, str]:
    """Part and path of `PART::PATH`; no part where the text begins with none."""
    part, mark, path = name.partition(MARK)
    return (part, path) if mark and part in PARTS else ("", name)
