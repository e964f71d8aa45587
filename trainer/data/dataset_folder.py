"""Folders that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` of the library `datasets` write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.data.files import io_error
from trainer.files.json_values import load_json
from trainer.files.reading import read_regular_file, resolve_named_path
from trainer.models.errors import PrepError, usage_error

DICT_FILE, STATE_FILE = "dataset_dict.json", "state.json"
DEFAULT_SPLIT = "train"


def is_dataset_dict(folder: Path) -> bool:
    """Return whether a folder is a saved `DatasetDict`, which has splits."""
    return (folder / DICT_FILE).is_file()


def dataset_files(folder: Path, split: str | None) -> list[Path] | None:
    """Return the Arrow files of a saved dataset, in their order; None if the folder is not one.

    Args:
        folder: Any folder.
        split: Split of a `DatasetDict`; None for `train`, or the only one.

    Raises:
        PrepError: The dataset has no such split, or its list of files is invalid.
    """
    if is_dataset_dict(folder):
        splits = _read_value(folder / DICT_FILE, "splits")
        name = choose_split(str(folder), splits, split)
        folder = resolve_named_path(folder, name, folder / DICT_FILE)
    state = folder / STATE_FILE
    if not state.is_file():
        return None
    files = _read_value(state, "_data_files")
    return [resolve_named_path(folder, _file_name(state, file), state) for file in files]


def choose_split(name: str, splits: list[Any], split: str | None) -> str:
    """Return the split to read: the requested one, the only one, or `train`.

    Args:
        name: Name of the dataset, for error messages.
        splits: Its splits.
        split: The requested split; None for the default.

    Raises:
        UsageError: There is no such split, or no default.
    """
    names = [str(item) for item in splits]
    if split is None and len(names) == 1:
        return names[0]
    if (split or DEFAULT_SPLIT) in names:
        return split or DEFAULT_SPLIT
    what = f"{name} has no split `{split or DEFAULT_SPLIT}`"
    hint = f"`data.split = {json.dumps(names[0])}`" if names else ""
    raise usage_error(what, f"its splits: {', '.join(names) or 'none'}", hint)


def _read_value(path: Path, key: str) -> list[Any]:
    """Return a list of a JSON file."""
    try:
        value = load_json(read_regular_file(path))[key]
    except OSError as error:
        raise io_error(path, error) from error
    except ValueError as error:
        raise _malformed_error(path, str(error)) from error
    except (KeyError, TypeError) as error:
        raise _malformed_error(path, f"it has no `{key}`") from error
    if not isinstance(value, list):
        raise _malformed_error(path, f"`{key}` is not a list")
    return value


def _file_name(state: Path, file: Any) -> str:
    name = file.get("filename") if isinstance(file, dict) else None
    if not isinstance(name, str) or Path(name).name != name:
        raise _malformed_error(state, f"`_data_files` has {file!r:.60}")
    return name


def _malformed_error(path: Path, why: str) -> PrepError:
    return PrepError(f"{path} is malformed", why, "save the dataset again with `save_to_disk`")
