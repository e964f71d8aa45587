"""Checkpoints with a record of added tokens, for add-tokens and remove-tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prepcli.commands.operations.conversion import CommonOptions
from prepcli.core.counts import count_text
from prepcli.formats.added_tokens import RECORD_FILE, Addition, parse_record
from prepcli.planning.plan import SmallFile
from prepcli.sources.source import HF_FOLDER, Source
from prepcli.targets.hf_folder import copied_small_files
from prepcli.targets.token_files import read_side_file


def folder_options(common: CommonOptions) -> CommonOptions:
    """Return options to open a checkpoint with. A quantised model keeps its codes and scales."""
    return replace(common, quantized="stored", verbatim=None)


def count_with_ids(first: int, count: int) -> tuple[str, str]:
    """Return the number of tokens and their ids as texts, e.g. `2 tokens` and `ids 7 to 8`."""
    if count == 1:
        ids = f"id {first}"
    else:
        ids = f"ids {first} to {first + count - 1}"
    return count_text(count, "token"), ids


def recorded_additions(source: Source) -> tuple[Addition, ...]:
    """Return the recorded additions of a source.

    Raises:
        DamagedError: The record is damaged.
    """
    data = read_side_file(source, RECORD_FILE)
    if data is None:
        return ()
    return parse_record(source.root / RECORD_FILE, data)


def replaced_files(source: Source, contents: Mapping[str, bytes | None]) -> list[SmallFile]:
    """Return the small files of a source with some contents replaced. Content None removes a file."""
    prefix = f"{HF_FOLDER}/" if source.tree_manifest else ""
    new_files = {prefix + name: content for name, content in contents.items()}
    files = [file for file in copied_small_files(source, prefix) if file.path not in new_files]
    for path, content in new_files.items():
        if content is not None:
            files.append(SmallFile(path, content))
    return files
