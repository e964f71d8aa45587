"""The files of a configuration and a split of a dataset: on the hub, in a folder, or saved by `datasets`.

The README of a dataset lists the files of each configuration and split. Without a list, the names of the files give
their splits, as `datasets` does: `train-00000-of-00004.parquet`, `test.csv` or `validation/0.jsonl`. The hub
creates a branch `refs/convert/parquet` of most datasets. Its folders are configurations and their splits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from prepcli.core.errors import Key, PrepError, Text, text, usage_error
from prepcli.core.json_values import load_json
from prepcli.stores.files import read_regular_file, resolve_named_path
from trainer.data.files import Note, io_error
from trainer.recipe.data_table import Data


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a dataset to read."""

    config: str | None = None  # Configuration of a dataset. None for its default.
    split: str | None = None  # Split of a dataset. None selects the only split, or `train`.
    revision: str | None = None  # Revision of a dataset on the hub. None for `main`.
    # Name of the recipe key of the split, for errors
    split_key: str = field(default="split", compare=False)


def train_selection(data: Data) -> Selection:
    """Return the part of a dataset to train on."""
    return Selection(data.config, data.split, data.revision)


def eval_selection(data: Data) -> Selection:
    """Return the part of a dataset to evaluate on: another split of the training data, or of `eval_path`."""
    if data.eval_path is None:
        return replace(train_selection(data), split=data.eval_split, split_key="eval_split")
    return Selection(split=data.eval_split, split_key="eval_split")


WHOLE = Selection()
README = "README.md"
DEFAULT_CONFIG = "default"
DEFAULT_SPLIT = "train"
CONVERTED = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d{4,}\.parquet")
SHARD = re.compile(r"(?:^|/)(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*$")
SPLIT_WORDS = {
    "train": re.compile(r"(?<![a-z])train(?:ing)?(?![a-z])", re.IGNORECASE),
    "validation": re.compile(r"(?<![a-z])(?:validation|valid|dev|val)(?![a-z])", re.IGNORECASE),
    "test": re.compile(r"(?<![a-z])(?:test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE),
}
EMPTY_WILDCARDS = ("**/", "**", "*")  # wildcards that also match an empty text
WILDCARD_OR_CHARACTER = re.compile(r"\*\*/|\*\*|.", re.DOTALL)
MAX_README_NBYTES = 16 << 20
# Metadata that `push_to_hub` of `datasets` writes. A folder with one of them is a copy of a dataset.
DATASET_KEYS = ("configs", "dataset_info")
NAME_FILES_HINT = text(
    "name its files in {}, e.g. `hf://datasets/OWNER/NAME/FILE`", Key("data.path")
)
Splits = Mapping[str, Sequence[str]]  # split -> its files
# The files of a split, or the splits of a configuration.
Item = TypeVar("Item")


def read_metadata(readme: Path | None, display_name: str = "") -> Mapping[str, object]:
    """Return the metadata at the top of a dataset's README, if there is one. Raise PrepError if it is not YAML."""
    from huggingface_hub.repocard import metadata_load

    if readme is not None:
        read_regular_file(readme, MAX_README_NBYTES)  # fails if it is larger
    try:
        return (readme and metadata_load(readme)) or {}
    # The exception types belong to the YAML library of huggingface_hub.
    except Exception as error:
        what = f"the metadata of {display_name or readme} is malformed"
        why = str(error).partition("\n")[0]
        raise PrepError(what, why, NAME_FILES_HINT) from error


def select_files(
    dataset: str,
    names: Iterable[str],
    metadata: Mapping[str, object],
    selection: Selection,
    *,
    accepts: Callable[[str], bool],
) -> list[str]:
    """Return the files of a split: in the order that the configuration lists them, else sorted by name.

    Args:
        dataset: Name of the dataset, for error messages.
        names: All files of the dataset.
        metadata: Metadata of its README.
        selection: Configuration and split. The defaults are `default`, and `train` or the only split.
        accepts: Returns whether a file is data, by its name. Used without a list of files.

    Raises:
        UsageError: The dataset has no such configuration or split, or no default.
    """
    ordered = sorted(names)
    configs = _listed_configs(metadata, ordered, accepts) or _converted_configs(ordered)
    if not configs:
        configs = {
            DEFAULT_CONFIG: splits_by_name(
                [name for name in ordered if _is_visible_data(name, accepts)]
            )
        }
    default_config = next(
        (
            _scalar_text(item["config_name"])
            for item in _readme_configs(metadata)
            if item.get("default")
        ),
        DEFAULT_CONFIG,
    )
    splits = _choose_item(
        dataset, "configuration", "config", configs, selection.config, default_config
    )
    return list(
        _choose_item(dataset, "split", selection.split_key, splits, selection.split, DEFAULT_SPLIT)
    )


def select_folder_files(
    folder: str,
    names: Sequence[str],
    metadata: Mapping[str, object],
    selection: Selection,
    *,
    accepts: Callable[[str], bool],
    note: Note,
) -> list[str]:
    """Return the data files of a folder on this machine or in a bucket: of a part of a dataset, or all of them.

    Args:
        folder: Name of the folder, for messages.
        names: Its visible files.
        metadata: Metadata of its README.
        selection: Configuration and split.
        accepts: Returns whether a file is data, by its name without folders.
        note: Called with a message about a folder that is read with all its splits.

    Raises:
        UsageError: The dataset has no such configuration or split, or no default.
    """
    is_dataset = any(metadata.get(key) for key in DATASET_KEYS)
    if is_dataset or selection.config is not None or selection.split is not None:
        return select_files(folder, names, metadata, selection, accepts=accepts)
    data = [name for name in names if accepts(name.rpartition("/")[2])]
    splits = splits_by_name(data)
    if len(splits) > 1:
        note(
            f"{folder} has files of several splits ({', '.join(splits)}) and all are read: `data.split` selects one"
        )
    return data


def _choose_item(
    dataset: str, noun: str, key: str, items: Mapping[str, Item], wanted: str | None, default: str
) -> Item:
    """Return the requested item, the only one, or the default. `key` is the recipe key of the item."""
    items = {name: item for name, item in items.items() if item}
    if wanted is None and len(items) == 1:
        return next(iter(items.values()))
    name = default if wanted is None else wanted
    if name in items:
        return items[name]
    if not items:
        raise usage_error(f"no data in {dataset}", f"its {noun}s: none", NAME_FILES_HINT)
    if wanted:
        what = f"{dataset} has no {noun} `{name}`"
    else:
        what = f"{dataset} has several {noun}s"
    hint = text("{}", Key(f"data.{key}", next(iter(items))))
    raise usage_error(what, f"its {noun}s: {', '.join(items)}", hint)


def _readme_configs(metadata: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the configurations in a README."""
    tables = metadata.get("configs")
    if not isinstance(tables, list):
        return []
    return [
        item for item in tables if isinstance(item, dict) and _scalar_text(item.get("config_name"))
    ]


def _scalar_text(value: object) -> str:
    """Return a YAML scalar as text, and an empty text for other values: aliases can make them very large."""
    if isinstance(value, str | int | float):
        return str(value)
    return ""


def _listed_configs(
    metadata: Mapping[str, object], names: Sequence[str], accepts: Callable[[str], bool]
) -> dict[str, Splits]:
    """Return the files of the configurations in a README, by name and split."""
    configs: dict[str, Splits] = {}
    for item in _readme_configs(metadata):
        folder = _scalar_text(item.get("data_dir") or "").strip("/")
        inside = names
        if folder:
            inside = [name for name in names if name.startswith(f"{folder}/")]
        if item.get("data_files"):
            splits = _listed_splits(item["data_files"], inside, folder)
        else:
            splits = splits_by_name([name for name in inside if _is_visible_data(name, accepts)])
        configs[_scalar_text(item["config_name"])] = splits
    return configs


def _listed_splits(data_files: object, names: Sequence[str], folder: str) -> Splits:
    """Return the files of a `data_files` entry: patterns, or tables with a split and its patterns."""
    if isinstance(data_files, list):
        entries = data_files
    else:
        entries = [data_files]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, dict):
            split = entry.get("split")
            patterns = entry.get("path")
        else:
            split = DEFAULT_SPLIT
            patterns = entry
        files = splits.setdefault(_scalar_text(split), [])
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            path = _scalar_text(pattern)
            if folder:
                path = f"{folder}/{path}"
            files += [name for name in names if matches(name, path) and name not in files]
    return splits


def matches(name: str, pattern: str) -> bool:
    """Return whether the path of a file, or of a folder above it, matches a glob. Only `**` spans folders."""
    parts = WILDCARD_OR_CHARACTER.findall(pattern.strip("/"))
    positions = _skip_empty_wildcards({0}, parts)
    for character in name:
        if character == "/" and len(parts) in positions:
            return True
        positions = _skip_empty_wildcards(_advance_positions(positions, parts, character), parts)
    return len(parts) in positions


def _skip_empty_wildcards(positions: set[int], parts: Sequence[str]) -> set[int]:
    """Return positions in a pattern, and those that follow if wildcards match nothing: {0} of `*a` -> {0, 1}."""
    reached: set[int] = set()
    for start in positions:
        position = start
        while position not in reached:
            reached.add(position)
            if 0 <= position < len(parts) and parts[position] in EMPTY_WILDCARDS:
                position += 1
    return reached


def _advance_positions(positions: set[int], parts: Sequence[str], character: str) -> set[int]:
    """Return the positions after one more character. ~i is inside of `**/` at i, which ends with a slash."""
    reached: set[int] = set()
    for position in positions:
        index = position if position >= 0 else ~position
        part = parts[index] if index < len(parts) else ""
        if part == "**/":
            reached.add(~index)
            if character == "/":
                reached.add(index + 1)
        elif part == "**" or (part == "*" and character != "/"):
            reached.add(index)
        elif part == character or (part == "?" and character != "/"):
            reached.add(index + 1)
    return reached


def _converted_configs(names: Sequence[str]) -> dict[str, Splits]:
    """Return the files of a branch converted to Parquet by the hub, or an empty dict."""
    found = [(name, match) for name in names if (match := CONVERTED.fullmatch(name))]
    configs: dict[str, dict[str, list[str]]] = {}
    for name, match in found:
        configs.setdefault(match["config"], {}).setdefault(match["split"], []).append(name)
    if len(found) == sum(name.endswith(".parquet") for name in names):
        return {**configs}
    return {}


def _is_visible_data(name: str, accepts: Callable[[str], bool]) -> bool:
    return accepts(name) and not any(part.startswith(".") for part in name.split("/"))


def splits_by_name(names: Sequence[str]) -> Splits:
    """Return files by the split in their names. All belong to `train` if no name has one."""
    shards = [(name, match["split"]) for name in names if (match := SHARD.search(name))]
    splits: dict[str, list[str]] = {}
    if not shards:
        for name in names:
            words = (split for split, word in SPLIT_WORDS.items() if word.search(name))
            shards.append((name, next(words, "")))
    for name, split in shards:
        if split:
            splits.setdefault(split, []).append(name)
    return splits or ({DEFAULT_SPLIT: names} if names else {})


DICT_FILE = "dataset_dict.json"
STATE_FILE = "state.json"


# Folders of `Dataset.save_to_disk` have a list of Arrow files in `state.json`. Folders of
# `DatasetDict.save_to_disk` have a list of splits in `dataset_dict.json`, and a folder per split.
def is_dataset_dict(folder: Path) -> bool:
    """Return whether a folder is a saved `DatasetDict`, with splits."""
    return (folder / DICT_FILE).is_file()


def is_saved_part(folder: Path) -> bool:
    """Return whether a folder is a saved `Dataset`: one split of a dataset."""
    return (folder / STATE_FILE).is_file() and not is_dataset_dict(folder)


def dataset_files(folder: Path, selection: Selection) -> list[Path] | None:
    """Return the Arrow files of a saved dataset in their order, or None for another folder.

    Raises:
        PrepError: The dataset has no such split, or its list of files is invalid.
    """
    if is_dataset_dict(folder):
        splits = _read_value(folder / DICT_FILE, "splits")
        name = choose_split(str(folder), splits, selection)
        folder = resolve_named_path(folder, name, folder / DICT_FILE)
    state = folder / STATE_FILE
    if not state.is_file():
        return None
    files: list[Path] = []
    for file in _read_value(state, "_data_files"):
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise _malformed_error(state, f"`_data_files` has {file!r:.60}")
        files.append(resolve_named_path(folder, name, state))
    return files


def choose_split(name: str, splits: list[Any], selection: Selection) -> str:
    """Return the split to read: the requested one, the only one, or `train`. Raise UsageError if there is none."""
    split = selection.split
    names = [str(item) for item in splits]
    if split is None and len(names) == 1:
        return names[0]
    if (split or DEFAULT_SPLIT) in names:
        return split or DEFAULT_SPLIT
    what = f"{name} has no split `{split or DEFAULT_SPLIT}`"
    hint = ""
    if names:
        hint = Text(Key(f"data.{selection.split_key}", names[0]))
    raise usage_error(what, f"its splits: {', '.join(names) or 'none'}", hint)


def _read_value(path: Path, key: str) -> list[Any]:
    """Return the list under a key of a JSON file."""
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


def _malformed_error(path: Path, why: str) -> PrepError:
    return PrepError(f"{path} is malformed", why, "save the dataset again with `save_to_disk`")
