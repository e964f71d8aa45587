"""Facts about a checkpoint other than its location, such as the user's model config and the part of an EasyLM file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prepcli.core.errors import Command, Key, Option, PrepError, text
from prepcli.stores.paths import AnyPath

CONFIG = "config.json"
PART_SEPARATOR = "::"
FLAX_PARAMS = "flax_params"
TRAIN_STATE_PARTS = ("trainstate", "trainstate_params")
# EasyLM's prefixes of a path, as in `params::PATH`.
EASYLM_PARTS = (
    *TRAIN_STATE_PARTS,
    "params",
    FLAX_PARAMS,
)

# Options of conversions, which recipes have no keys for.
CONVERSION_OPTIONS = {"config", "drop", "layers", "map", "quantized", "source_layout", "verbatim"}

# "rounded": outputs that the scale has changed. Otherwise they are refused. "all": exact ones, too.
KeptScales = Literal["none", "rounded", "all"]


@dataclass(frozen=True, slots=True)
class SourceHints:
    """Facts about a checkpoint that its files do not state.

    Attributes:
        config_path: A config.json, or a folder that contains one, for checkpoints without a config.
        part: One of EASYLM_PARTS, or an empty string.
        verbatim: True: use the verbatim family. None: use it if no family has the model_type. False: never use it.
        copied_files: Name patterns of further side files to copy.
        kept_scales: Which outputs with a scale of another trainer's layout are read as they are stored.
        layout: Layout of a tree of another library, or None for the one that fits best.
        training_state: Whether the optimizer state of another framework is read.
        drop: Patterns of tensors that may lie among those of a text part.
    """

    config_path: Path | None = None
    part: str = ""
    verbatim: bool | None = False
    copied_files: tuple[str, ...] = ()
    kept_scales: KeptScales = "none"
    layout: str | None = None
    training_state: bool = False
    drop: tuple[str, ...] = ()

    def resolve_config_path(self, folder: AnyPath, display_name: str) -> AnyPath:
        """Return the path of the config.json to use: the user's, else the one in `folder`.

        Raises:
            PrepError: The user's config does not exist, or the user supplied none and the folder has none.
        """
        if self.config_path:
            path: AnyPath = self.config_path.expanduser()
            if not path.exists():
                what = text("{} does not exist", Option("config", str(self.config_path)))
                hint = f"pass a {CONFIG}, or a folder with one"
                raise PrepError(what, "the weights are read by the config of their model", hint)
        else:
            path = folder
        if path.is_dir():
            path = path / CONFIG
        if self.config_path is None and not path.is_file():
            hint = text("{}: a folder with the model's {}", Option("config", "FOLDER"), CONFIG)
            raise PrepError(f"{display_name} has no {CONFIG}", f"{path} does not exist", hint)
        return path


NO_HINTS = SourceHints()


def split_part(name: str) -> tuple[str, str]:
    """Split `PART::PATH` into part and path. The part is empty unless it is one of EASYLM_PARTS."""
    part, separator, path = name.partition(PART_SEPARATOR)
    if separator and part in EASYLM_PARTS:
        return (part, path)
    return ("", name)


@contextmanager
def advise_conversion(model: str) -> Iterator[None]:
    """In the errors of the block, replace a hint with an option of conversions by the conversion that has it.

    Args:
        model: Value of the recipe key `model.path`.
    """
    try:
        yield
    except PrepError as error:
        options = [part for part in getattr(error.hint, "parts", ()) if isinstance(part, Option)]
        if not any(option.name in CONVERSION_OPTIONS for option in options):
            raise
        command = Command("save-init", model, *options)
        hint = text("{}, and name its output in {}", command, Key("model.path"))
        raise error.with_texts(hint=hint) from error.__cause__
