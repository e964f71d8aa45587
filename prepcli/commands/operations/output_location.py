"""Checks of the place of an output: it must not replace the source, or folders of the user."""

from __future__ import annotations

import os
from pathlib import Path

from prepcli.core.errors import Option, OutputExistsError, text, usage_error
from prepcli.execution.output_urls import check_local_path
from prepcli.sources.source import Source
from prepcli.stores.object_url import ObjectStoreUrl, is_url, parse_url
from prepcli.stores.paths import AnyPath, StorePath
from prepcli.stores.reading import check_parent_folder, io_error, read_small_file, stat_file
from prepcli.stores.writing import write_file

UNWRITTEN_SOURCES = "sources are never written to"


def check_output_location(out: Path, source: Source) -> None:
    """Raise UsageError if writing the output would change or delete the source or the user's own folders."""
    target = out.resolve()
    # A conversion writes to NAME.partial and renames it at the end, so neither name may be the source.
    partial = target.with_name(target.name + ".partial")
    root_folder = source.root
    if isinstance(root_folder, StorePath):
        return
    source_files: list[AnyPath] = []
    if not root_folder.is_file():
        source_files = [*source.files, *(file.path for file in source.small_files)]
    # Links may point to other folders, so each file is resolved.
    file_folders = (path.resolve().parent for path in source_files)
    weight_folders = {root_folder.resolve(), *(path.resolve().parent for path in source.files)}
    other_name = text("{}", Option("out", "NAME"))
    for root in dict.fromkeys((root_folder.resolve(), *file_folders)):
        if root in (target, partial):
            raise usage_error(f"the output {out} is the source", UNWRITTEN_SOURCES, other_name)
        # An output inside a folder of settings is allowed.
        if root in target.parents and root in weight_folders:
            hint = text("{}", Option("out", f"../{out.name}"))
            raise usage_error(f"the output {out} is inside the source", UNWRITTEN_SOURCES, hint)
        if target in root.parents:
            raise usage_error(
                f"the source is inside the output {out}", "it would be deleted", other_name
            )
    for folder in (Path.cwd(), Path(os.path.expanduser("~")).resolve()):
        if target == folder or target in folder.parents:
            what = f"the output {out} would replace the current folder or your home folder"
            why = f"{folder} is inside it, and outputs replace whole folders"
            raise usage_error(what, why, other_name)


def check_output_url(url: ObjectStoreUrl, source: Source) -> None:
    """Raise UsageError if the output would replace objects of the source, or of the folder around it."""
    if not is_url(source.display_name):
        return
    source_url = parse_url(source.display_name)
    if (source_url.scheme, source_url.bucket) != (url.scheme, url.bucket):
        return
    out_parts = url.path.split("/") if url.path else []
    source_parts = source_url.path.split("/") if source_url.path else []
    num_common = min(len(out_parts), len(source_parts))
    if out_parts[:num_common] == source_parts[:num_common]:
        what = f"the output {url} and the source {source_url} overlap"
        raise usage_error(what, UNWRITTEN_SOURCES, text("{}", Option("out", "URL")))


# --- Write the single file of a command's result. An equal file stays, and another one needs `overwrite`


def check_result_path(path: Path) -> None:
    """Check that a result can be written, before the work for it begins.

    Raises:
        PrepError: The path is a URL, something other than a regular file has the name, or its folder does not exist.
    """
    check_local_path(path)
    check_parent_folder(path)
    if path.exists():
        stat_file(path)


def write_result(
    path: Path,
    data: bytes,
    overwrite: bool,
    *,
    why: str = "its content differs",
    hint: str = "{} replaces it",
) -> bool:
    """Write the file of a result, and return whether an equal file exists already.

    Raises:
        OutputExistsError: The file has other content, and `overwrite` is False.
        PrepError: The file cannot be read or written.
    """
    if path.exists():
        # A larger file differs, so its content is not read.
        has_equal_size = stat_file(path).st_size == len(data)
        if has_equal_size and read_small_file(path, max_nbytes=len(data)) == data:
            return True
        if not overwrite:
            what = f"{path} already exists"
            raise OutputExistsError(what, why, text(hint, Option("overwrite", True)))
    try:
        write_file(path, data)
    except OSError as error:
        raise io_error(path, error) from error
    return False
