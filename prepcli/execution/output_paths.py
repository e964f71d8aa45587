"""The paths of an output: its folder or URL, and its files, checked before anything is written.

Names of tensors and files come from untrusted checkpoints. Every writer (raw, compressed, several processes, a bucket)
joins only paths that follow from the plan, so that one check of the plan covers all of them.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from prepcli.core.errors import Option, PrepError, UsageError, text, usage_error
from prepcli.core.json_values import quote_name
from prepcli.execution.finalize import WORK_FOLDER
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.formats.orbax import CHECKPOINT_METADATA_FILE, COMMIT_MARKER, STRINGS_FILE
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.planning.plan import Plan
from prepcli.stores.addresses import ObjectStoreUrl, is_url, parse_url
from prepcli.stores.files import io_error, name_fault

# Files that prep writes beside the data: in the folder of an item, and in the folder of the output.
ITEM_FILES = (METADATA_FILE, CHECKPOINT_METADATA_FILE, STRINGS_FILE, COMMIT_MARKER)
OUTPUT_FILES = (MANIFEST_FILE, CHECKSUMS_FILE, WORK_FOLDER)
RETRIES = 10  # of obstore, for each request


def check_output_paths(plan: Plan) -> None:
    """Check that each file of a plan is inside of the output, and that none is in the place of another.

    Raises:
        UsageError: The storage makes a folder of the name of a leaf, and the name cannot be one.
        PrepError: The path of another file leaves the output, or has the place of another one.
    """
    if plan.storage.has_chunk_files:
        for leaf in plan.leaves:
            if fault := name_fault(leaf.name):
                raise _folder_name_error(plan, leaf.name, fault)
    paths: list[tuple[str, ...]] = []
    for path in _planned_paths(plan):
        parts = tuple(path.split("/"))
        for part in parts:
            if fault := name_fault(part):
                raise PrepError(
                    f"{quote_name(path)} cannot be a file of the output",
                    fault,
                    "rename it in the source",
                )
        paths.append(parts)
    # After sorting, a path comes directly before the first path below it, e.g. (x), (x, y), (z).
    for first, second in itertools.pairwise(sorted(paths)):
        if second[: len(first)] == first:
            raise _shared_path_error(plan, "/".join(first), "/".join(second))


def _planned_paths(plan: Plan) -> Iterator[str]:
    """Yield the paths of the files in the output. A leaf in a folder of its own counts as one path."""
    yield from OUTPUT_FILES
    for item, leaves in plan.items.items():
        folder = PurePosixPath(plan.item, item or "")
        for name in ITEM_FILES:
            yield str(folder / name)
        if plan.storage.has_chunk_files:
            for leaf in leaves:
                # Not `/`, which drops a part `.` and everything before an absolute path.
                yield "/".join((*folder.parts, leaf.name))
    data_files = () if plan.storage.has_chunk_files else plan.files
    for file in (*data_files, *plan.small_files):
        yield "/".join((*PurePosixPath(plan.item).parts, file.path))


def _folder_name_error(plan: Plan, name: str, fault: str) -> UsageError:
    """Return the error for a leaf with a name that cannot be the name of its folder."""
    option = Option("storage", plan.settings.get("storage"))
    return usage_error(
        text("{} cannot store {}", option, quote_name(name)),
        f"each array is a folder of its name, and {fault}",
        text("{} has no such limit", Option("storage", "ocdbt")),
    )


def _shared_path_error(plan: Plan, first: str, second: str) -> PrepError:
    """Return the error for two files of which the first has the path of the second, or of a folder above it."""
    what = f"two files of the output would have the name {quote_name(first)}"
    if first != second:
        what = f"{quote_name(first)} would be a file of the output, and the folder of another one"
    hint = "rename the file in the source"
    if plan.storage.has_chunk_files:
        hint = text("{} makes no folder for an array", Option("storage", "ocdbt"))
    return PrepError(what, f"the other one is {quote_name(second)}", hint)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if it exists. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_same_file(file_stat: os.stat_result, path: Path) -> bool:
    """Return whether a path leads to the file or folder of the stat result. Raise PrepError if nobody can tell."""
    try:
        return os.path.samestat(file_stat, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_error(path, error) from error


def parse_out_url(path: Path | None) -> ObjectStoreUrl | None:
    """Return the URL given as a path, such as `--out`, or None for a local path.

    `Path` collapses the `//` of a URL to `/`. This function restores it.

    Raises:
        UsageError: The scheme is not supported, or the bucket or path is invalid.
    """
    if path is None:
        return None
    scheme, colon, rest = path.as_posix().partition(":/")
    url = f"{scheme}://{rest}"
    if not colon or not is_url(url):
        return None
    return parse_url(url)


def check_local_path(path: Path | None) -> None:
    """Raise UsageError if the path of tokens, a page or another small output is a URL."""
    url = parse_out_url(path)
    if url is not None:
        why = "only checkpoints and training runs are written to buckets"
        raise usage_error(f"cannot write {url}", why, "name a local path, then copy the result")
