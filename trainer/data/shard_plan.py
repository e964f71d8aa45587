"""The plan of several processes for the files of one store.

A shard is a range of consecutive files, and its tokens are a store of their own. The plan has the
size and the digest of each file. The first process writes it, and it does not depend on the number
of processes: any number of them may continue the work of others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import load_json
from prepcli.stores.files import read_regular_file, write_file
from trainer.data.files import DataFile, io_error

PLAN_FILE = "plan.json"
PLAN_VERSION = 1
# A store per file makes the merge slow for very many small files.
MAX_SHARDS = 1024
DIGEST_KEY = "digest"

FoundFile: TypeAlias = Path | DataFile


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a plan.

    Attributes:
        name: Its name without folders. Hosts may have different ones.
        nbytes: Size in bytes.
        digest: Digest of its content. See `DataFile.digest`.
    """

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The shards of a store.

    Attributes:
        settings: Digest of the settings of tokenization, without the files.
        identity: Identity of the store.
        files: The files, in the order of the store. None is empty.
        shard_ends: End of each shard in `files`.
        stamps: Digest of the stamps of the files before they were read for their digests (see
            `cache_records`). Empty in plans of earlier versions.
    """

    settings: str
    identity: str
    files: tuple[PlannedFile, ...]
    shard_ends: tuple[int, ...]
    stamps: str = ""

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self.shard_ends)

    def shard_files(self, shard: int) -> slice:
        """Return the range of the files of a shard."""
        start = 0
        if shard:
            start = self.shard_ends[shard - 1]
        return slice(start, self.shard_ends[shard])


def make_plan(
    settings: str,
    identity: str,
    files: Sequence[DataFile],
    *,
    stamps: str = "",
    max_shards: int = MAX_SHARDS,
    companion_suffix: str = "",
) -> ShardPlan:
    """Return a plan with shards of about equal size, each of at least one file.

    Args:
        settings: Digest of the settings of tokenization, without the files.
        identity: Identity of the store.
        files: The files.
        stamps: Digest of their stamps before they were read.
        max_shards: About the maximum number of shards.
        companion_suffix: Suffix of files in the shard of the file before them. Empty for none.
    """
    planned = tuple(PlannedFile(_name(file), file.nbytes, file.digest) for file in files)
    ends = tuple(_shard_ends(planned, max_shards, companion_suffix))
    return ShardPlan(settings, identity, planned, ends, stamps)


def _shard_ends(
    files: Sequence[PlannedFile], max_shards: int, companion_suffix: str
) -> Iterator[int]:
    """Yield the end of each shard: where the size of its files reaches its part of all bytes."""
    total_nbytes = sum(file.nbytes for file in files)
    nbytes = 0
    for index, file in enumerate(files, start=1):
        nbytes += file.nbytes
        next_names = [following.name for following in files[index : index + 1]]
        if companion_suffix and next_names and next_names[0].endswith(companion_suffix):
            continue
        # In whole numbers, so that all hosts divide the files alike.
        if nbytes * max_shards >= total_nbytes or index == len(files):
            yield index
            nbytes = 0


def write_plan(folder: Path, plan: ShardPlan) -> None:
    """Write a plan durably, unless another process has written one.

    Raises:
        PrepError: The folder cannot be written.
    """
    path = folder / PLAN_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            write_file(path, _encode(plan), overwrite=False)
    except OSError as error:
        raise io_error(path, error) from error


def _encode(plan: ShardPlan) -> bytes:
    values = asdict(plan)
    return json.dumps({**values, DIGEST_KEY: _digest(values)}).encode()


def _digest(values: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([PLAN_VERSION, values]).encode())


def read_plan(folder: Path) -> ShardPlan | None:
    """Return the plan in a folder, or None if there is none.

    Raises:
        PrepError: It is damaged.
    """
    path = folder / PLAN_FILE
    try:
        values = load_json(read_regular_file(path))
        digest = values.pop(DIGEST_KEY)
        if digest == _digest(values):
            files = tuple(PlannedFile(**file) for file in values["files"])
            return ShardPlan(
                values["settings"],
                values["identity"],
                files,
                tuple(values["shard_ends"]),
                values.get("stamps", ""),
            )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise io_error(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise PrepError(f"{path} is damaged", "it differs from its digest", _restart_hint(folder))


def check_settings(folder: Path, plan: ShardPlan, settings: str) -> None:
    """Raise PrepError if a plan was made with other settings of tokenization."""
    if plan.settings != settings:
        what = f"the unfinished tokens in {folder} are of another recipe"
        why = "the tokenizer or a setting of the data differs"
        raise PrepError(
            what, why, f"use the recipe of all other processes, or {_restart_hint(folder)}"
        )


def planned_data_files(
    folder: Path, plan: ShardPlan, found: Sequence[FoundFile]
) -> tuple[DataFile, ...]:
    """Return the files of this process with the digests of the plan. Local files are not read.

    The readers check the digests.

    Raises:
        PrepError: The files of this process differ from the plan.
    """
    files = tuple(file for file in map(_with_size, found) if file.nbytes)
    if len(files) != len(plan.files):
        why = f"this process has {count_text(len(files), 'file')}, the plan has {len(plan.files):,}"
        raise _other_data_error(folder, "the data", why)
    # The name and the size cost no read. A reader compares the digest, of the files of its shards only.
    planned: list[DataFile] = []
    for file, expected in zip(files, plan.files):
        actual = PlannedFile(_name(file), file.nbytes, file.digest or expected.digest)
        if actual != expected:
            why = f"it has {count_text(file.nbytes, 'byte')}, the plan has {expected.name} with {expected.nbytes:,}"
            raise _other_data_error(folder, str(file.path), why)
        planned.append(DataFile(file.path, file.nbytes, expected.digest, file.open_remote))
    return tuple(planned)


def _with_size(file: FoundFile) -> DataFile:
    """Return a found file with its size. A local one has no digest."""
    if isinstance(file, DataFile):
        return file
    try:
        return DataFile(file, file.stat().st_size, "")
    except OSError as error:
        raise io_error(file, error) from error


def _name(file: DataFile) -> str:
    """Return the name of a file without folders. Bytes outside UTF-8 are escaped, since JSON has none."""
    return Path(str(file.path)).name.encode(errors="backslashreplace").decode()


def _other_data_error(folder: Path, what: str, why: str) -> PrepError:
    return PrepError(
        f"{what} differs from the plan of the other processes",
        why,
        f"use the same files in all processes, or {_restart_hint(folder)}",
    )


def _restart_hint(folder: Path) -> str:
    return f"`rm -r {folder}` starts again"
