"""Side files of a model: tokenizer, templates, licence and all other files except config, weights and code.

A conversion copies them unread. Files in subfolders keep their place, e.g. `additional_chat_templates/tool_use.jinja`.
Folders are of any origin: hidden files, links to folders, weights, other checkpoints and large folders are left.

Files that prep parses (weights, their index, `config.json`, `params.json`) may be links to any path: unparsable files
are errors. Files to copy or upload unparsed may be links only within the folder named by the user, or, in the Hugging
Face cache, into `blobs` of the same model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.json_values import is_utf8
from prepcli.formats import torch_files
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.formats.orbax import ITEM_MARKERS
from prepcli.formats.registry import INDEX_FILES, SUFFIXES
from prepcli.formats.torch_dcp import METADATA_FILE as DCP_METADATA_FILE
from prepcli.planning.item_storage import ZARR2, ZARR3
from prepcli.sources.references import CONFIG
from prepcli.stores.files import list_folder
from prepcli.stores.paths import (
    SMALL_NBYTES,
    AnyPath,
    StorePath,
    create_temporary_folder,
    fetch_copies,
    local_copy,
)

# Layout of the Hugging Face cache: `models--OWNER--NAME/snapshots/COMMIT` and `models--OWNER--NAME/blobs`
SNAPSHOTS = "snapshots"
BLOBS = "blobs"
MODEL_FOLDER_PREFIX = "models--"
# A file of transformers' Trainer. A copy of it in another step would have the wrong step number.
TRAINER_STATE_FILE = "trainer_state.json"
WEIGHT_SUFFIXES = (*SUFFIXES, ".h5", ".gguf", ".onnx", ".ot", ".npz")
CODE_SUFFIX = ".py"
# Names at the top of a model's folder that a conversion writes itself, or that belong to a training.
SKIPPED_NAMES = {CONFIG, MANIFEST_FILE, TRAINER_STATE_FILE, *INDEX_FILES}
# Files that show that a subfolder is a checkpoint of its own, or a part of one.
CHECKPOINT_MARKERS = {
    *ITEM_MARKERS,
    MANIFEST_FILE,
    DCP_METADATA_FILE,
    ZARR2.document,
    ZARR3.document,
}
LOG_PREFIX = "events.out.tfevents."
BYTECODE_FOLDER = "__pycache__"
# Limits of the files in subfolders, of each folder at the top. Tokenizers have up to 33 MB.
MAX_FILES = 1_000
MAX_NBYTES = 256 << 20
MAX_DEPTH = 8


def resolve_small_file(path: AnyPath, root: AnyPath) -> Path:
    """Return the real path of a file to copy or upload unparsed, or of its local copy if it is in a store.

    Args:
        path: The file, as it was listed.
        root: The checkpoint named by the user, possibly a link. A file outside of it (next to the user's config) is
            checked against its own folder.
    """
    if isinstance(path, StorePath):
        return path.local().resolve()
    folder = root if root.is_dir() else root.parent
    if folder not in path.parents:
        folder = path.parent
    # Compare real paths: the checkpoint may itself be named through a link, and a text such as
    # `folder/../x` begins with the folder without lying in it.
    real_path = path.resolve()
    real_folder = folder.resolve()
    if real_folder in real_path.parents:
        return real_path
    # All files of a snapshot in the Hugging Face cache are links to `../../blobs/HASH`. Other models'
    # blobs stay out of reach.
    model = real_folder.parent.parent
    is_in_cache = model.name.startswith(MODEL_FOLDER_PREFIX)
    is_snapshot = is_in_cache and real_folder.parent.name == SNAPSHOTS
    if is_snapshot and model / BLOBS in real_path.parents:
        return real_path
    why = f"it leaves {folder}, and its bytes would be copied into the output"
    # Else a parent folder of the path is the link.
    target = os.readlink(path) if path.is_symlink() else real_path
    what = f"{path} is a link to {target}"
    raise PrepError(what, why, "replace the link by the file, or remove it")


@dataclass(frozen=True, slots=True)
class SideFile:
    """A side file.

    Attributes:
        path: Path of the file.
        name: Path within the folder of the model, e.g. `1_Pooling/config.json`.
    """

    path: AnyPath
    name: str

    @classmethod
    def at_top(cls, path: AnyPath) -> SideFile:
        """Return a file at the top of a model's folder."""
        return cls(path, path.name)

    @property
    def is_at_top(self) -> bool:
        """Whether the file is not in a subfolder."""
        return "/" not in self.name


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a listing: its path within the folder of the model, and its size."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SelectedNames:
    """Names of side files, and descriptions of the other subfolders, e.g. `onnx/ (weights)`."""

    copied: tuple[str, ...]
    left: tuple[str, ...]
    omitted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SideFiles:
    """The side files of a model.

    Attributes:
        copied: Files to copy.
        left: Files that are copied only on request: code.
        omitted: Descriptions of subfolders that are not copied, e.g. `onnx/ (weights)`.
    """

    copied: tuple[SideFile, ...] = ()
    left: tuple[SideFile, ...] = ()
    omitted: tuple[str, ...] = ()


NO_SIDE_FILES = SideFiles()


def find_side_files(
    folder: AnyPath, patterns: Sequence[str] = (), names: Sequence[str] | None = None
) -> SideFiles:
    """List the files of a model except config, weights and the record of a training.

    `patterns` (`--copy`) select files in any case. `names` are those in the folder, if they were listed before.
    """
    if not folder.is_dir():
        return NO_SIDE_FILES
    files: list[ListedFile] = []
    omitted: list[str] = []
    for name in list_folder(folder) if names is None else names:
        path = folder / name
        if is_hidden(name):
            continue
        if not path.is_dir() or path.is_symlink():
            _add_entry(path, name, files, omitted)
            continue
        try:
            nested = list(_walk(path, name))
        except OSError as error:
            omitted.append(f"{_printable(name)}/ ({error.strerror})")
            continue
        for nested_name, nested_path in nested:
            _add_entry(nested_path, nested_name, files, omitted)
    selected = select_side_files(files, patterns)
    return SideFiles(
        tuple(SideFile(folder / name, name) for name in selected.copied),
        tuple(SideFile(folder / name, name) for name in selected.left),
        (*omitted, *selected.omitted),
    )


def _add_entry(path: AnyPath, name: str, files: list[ListedFile], omitted: list[str]) -> None:
    """Append an entry of a folder to the files, or the reason why it is not copied to `omitted`."""
    if path.is_file():
        nbytes = path.stat().st_size
        if isinstance(path, StorePath) and nbytes > SMALL_NBYTES and not is_weight_file(name):
            omitted.append(f"{_printable(name)} ({format_bytes(nbytes)})")
        else:
            files.append(ListedFile(name, nbytes))
    elif path.is_dir():
        omitted.append(f"{_printable(name)}/ (a link)")
    elif is_hidden(name) or ("/" not in name and (name in SKIPPED_NAMES or is_weight_file(name))):
        # The readers of the config and of the weights name these files.
        return
    elif path.exists():
        omitted.append(f"{_printable(name)} (a pipe, a device or a socket)")
    else:
        omitted.append(f"{_printable(name)} (a broken link)")


def local_folder(files: Iterable[SideFile], folder: AnyPath) -> Path:
    """Return a folder on a disk with the config and the side files at the top of a model's folder."""
    if isinstance(folder, Path):
        return next((local_copy(file.path).parent for file in files if file.is_at_top), folder)
    paths = [file.path for file in files if file.is_at_top]
    if (folder / CONFIG).is_file():
        paths.append(folder / CONFIG)
    fetch_copies(paths)
    return local_copy(paths[0]).parent if paths else create_temporary_folder()


def select_side_files(files: Iterable[ListedFile], patterns: Sequence[str] = ()) -> SelectedNames:
    """Select the side files of a model from a listing of its folder, local or remote."""
    copied: list[str] = []
    left: list[str] = []
    omitted: list[str] = []
    by_folder: dict[str, list[ListedFile]] = {}
    for file in sorted(files, key=attrgetter("name")):
        folder, slash, _ = file.name.partition("/")
        if is_hidden(file.name):
            continue
        if slash:
            by_folder.setdefault(folder, []).append(file)
        elif file.name in SKIPPED_NAMES or is_weight_file(file.name):
            continue
        elif is_utf8(file.name):
            _sort_by_kind(file.name, patterns, copied, left)
        else:
            omitted.append(f"{_printable(file.name)} (not UTF-8)")
    for folder, nested in by_folder.items():
        reasons = _omitted_folders(folder, nested)
        omitted += [f"{_printable(name)}/ ({reason})" for name, reason in reasons.items()]
        for file in nested:
            is_omitted = any(file.name.startswith(f"{name}/") for name in reasons)
            if is_omitted and matches_any(file.name, patterns) and not is_weight_file(file.name):
                if len(nested) > MAX_FILES or file.nbytes > MAX_NBYTES:
                    what = f"{file.name} is too large to copy: {format_bytes(file.nbytes)}"
                    if len(nested) > MAX_FILES:
                        what = f"{folder}/ has more than {MAX_FILES:,} files"
                    option = Option(
                        "copy", next(p for p in patterns if matches_any(file.name, [p]))
                    )
                    raise PrepError(
                        what, text("{} takes side files of a model", option), "copy it yourself"
                    )
                copied.append(file.name)
            elif not is_omitted:
                _sort_by_kind(file.name, patterns, copied, left)
    return SelectedNames(tuple(copied), tuple(left), tuple(omitted))


def unread_weights(names: Iterable[str], read_names: Collection[str]) -> list[str]:
    """Return the unread weight files at the top of a folder, except those of a training run."""
    unread: list[str] = []
    for name in names:
        if "/" in name or is_hidden(name) or name in read_names:
            continue
        if is_weight_file(name) and not torch_files.is_training_file(name):
            unread.append(f"{_printable(name)} (other weights)")
    return unread


def check_patterns(
    option: str, patterns: Sequence[str], copied: Sequence[SideFile], display_name: str
) -> None:
    """Raise UsageError for a pattern of an option without a match among the copied side files."""
    # Code is copied only on request, so that an export has other files to leave out.
    example = "README.md" if option == "exclude" else "*.py"
    for pattern in patterns:
        if not any(matches_any(file.name, [pattern]) for file in copied):
            what = text("{} matches no file of {}", Option(option, pattern), display_name)
            why = "it takes names of side files, not of weights"
            raise usage_error(what, why, f"use a pattern such as `{example}` or `FOLDER/*`")


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file matches a pattern. `*` without a slash matches no file in a subfolder."""
    if "/" in name:
        patterns = [pattern for pattern in patterns if "/" in pattern]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_weight_file(name: str) -> bool:
    """Return whether a file has weights, by its name."""
    return name.endswith(WEIGHT_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Return whether a file or one of its folders is hidden, or is bytecode. No name leaves its folder by `..`."""
    parts = name.split("/")
    return "" in parts or any(part.startswith(".") or part == BYTECODE_FOLDER for part in parts)


def _sort_by_kind(name: str, patterns: Sequence[str], copied: list[str], left: list[str]) -> None:
    """Append a side file to the files to copy or to the files to leave."""
    # Code of a model is only copied on request: a folder that prep writes runs no code when it is loaded.
    if name.endswith(CODE_SUFFIX) and not matches_any(name, patterns):
        left.append(name)
    else:
        copied.append(name)


def _omitted_folders(top: str, files: Sequence[ListedFile]) -> dict[str, str]:
    """Return the subfolders to leave, with the reason. All files below them are left."""
    if len(files) > MAX_FILES:
        return {top: f"more than {MAX_FILES:,} files"}
    omitted: dict[str, str] = {}
    for file in files:
        folder, _, name = file.name.rpartition("/")
        if is_weight_file(name) or name in CHECKPOINT_MARKERS:
            omitted[folder] = "weights"
        elif not file.name.isprintable():
            omitted.setdefault(folder, "unprintable names")
        elif name.startswith(LOG_PREFIX):
            omitted.setdefault(folder, "logs")
        elif file.name.count("/") > MAX_DEPTH:
            omitted.setdefault(folder, f"more than {MAX_DEPTH} levels")
    outer = {
        folder: reason
        for folder, reason in omitted.items()
        if not any(folder.startswith(f"{other}/") for other in omitted)
    }
    nbytes = 0
    for file in files:
        if not any(file.name.startswith(f"{name}/") for name in outer):
            nbytes += file.nbytes
    if nbytes > MAX_NBYTES:
        return {top: f"{format_bytes(nbytes)}, the limit is {format_bytes(MAX_NBYTES)}"}
    return outer


def _walk(folder: AnyPath, name: str) -> Iterator[tuple[str, AnyPath]]:
    """Yield the files below a subfolder, and the links to folders, with their names. At most MAX_FILES + 1 entries."""
    num_entries = 0
    waiting = [(name, folder)]
    while waiting:
        parent, parent_folder = waiting.pop()
        for child in sorted(parent_folder.iterdir(), key=lambda child: child.name):
            if child.is_dir() and not child.is_symlink():
                if not is_hidden(child.name):
                    waiting.append((f"{parent}/{child.name}", child))
            else:
                num_entries += 1
                yield f"{parent}/{child.name}", child
            if num_entries > MAX_FILES or len(waiting) > MAX_FILES:
                return


def _printable(name: str) -> str:
    """Return a name for messages, with unprintable characters escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]
