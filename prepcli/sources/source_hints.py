"""What a user says of a checkpoint besides where it is: what model it is of, and which part of it is meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prepcli.errors import PrepError

CONFIG = "config.json"
PART_SEPARATOR = "::"
FLAX_PARAMS = "flax_params"
TRAIN_STATE_PARTS = ("trainstate", "trainstate_params")
EASYLM_PARTS = (*TRAIN_STATE_PARTS, "params", FLAX_PARAMS)  # EasyLM's names, written before a path as `params::PATH`


@dataclass(frozen=True, slots=True)
class SourceHints:
    """`config`: a config.json, or a folder with one, for checkpoints that have none; `part`: one of PARTS, or empty."""

    config_path: Path | None = None
    part: str = ""

    def resolve_config_path(self, folder: Path, display_name: str) -> Path:
        """The config.json that counts: the given one, else that of the folder. PrepError where there is none."""
        path = self.config_path.expanduser() if self.config_path else folder
        path = path / CONFIG if path.is_dir() else path
        if self.config_path is None and not path.is_file():
            hint = f"`--config FOLDER`: one with the model's {CONFIG}"
            raise PrepError(f"{display_name} does not say what model it is of", f"there is no {path}", hint)
        return path


NO_HINTS = SourceHints()


def split_part(name: str) -> tuple[str, str]:
    """Part and path of `PART::PATH`; no part where the text begins with none."""
    part, mark, path = name.partition(PART_SEPARATOR)
    return (part, path) if mark and part in EASYLM_PARTS else ("", name)
