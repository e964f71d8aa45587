"""Read the examples of data files by shard, and skip a limited number of invalid records."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from prepcli.core.errors import Key, PrepError, Text, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject
from trainer.data.examples import Example, IdentityChange, Segment
from trainer.data.fields import ExampleBuilder
from trainer.data.files import DataFile, Note, changed_file_error, hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import (
    IdsChunk,
    ReadOptions,
    RecordLimitError,
)
from trainer.recipe.text_fields import (
    DEFAULT_IDS_DTYPE,
    DEFAULT_MAX_DOCUMENT_NBYTES,
    DataType,
    FileType,
)

# Skipped lines that are reported, with file and line.
SHOWN = 3
# Types of files that may be one list, since `IdentityChange.JSON_LISTS`.
LIST_TYPES = ("json",)
# Raise it when a reader counts the bytes of its records in another way, or a shard has other records.
LAYOUT_VERSION = 1


class BadLines:
    """Handler of invalid records. It reports the first ones, and raises an error above a limit.

    Attributes:
        count: Invalid records so far.
    """

    def __init__(self, limit: int, note: Note, *, count: int = 0) -> None:
        """Create a handler, perhaps with the invalid records of an earlier run."""
        self._limit = limit
        self._note = note
        self.count = count

    def __call__(self, error: PrepError) -> None:
        """Count an invalid record. Raise PrepError if it is one more than the limit, or has reached a limit."""
        if isinstance(error, RecordLimitError):
            raise error
        self.count += 1
        if self.count <= self._limit:
            if self.count <= SHOWN:
                self._note(f"skipped {error.what} ({error.why})")
        elif self._limit:
            what = text("{}, after {}", error.what, count_text(self._limit, "invalid line"))
            why = text("{}, and {} allows {:,}", error.why, Key("data.bad_lines"), self._limit)
            raise PrepError(what, why, error.hint) from error
        else:
            raise error

    def report(self) -> None:
        """Report the number of skipped records, if there are any."""
        if self.count:
            self._note(f"{count_text(self.count, 'invalid line')} skipped")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of reading records, except the settings of their examples."""

    # Size of the model's vocabulary without padding. Token ids in the data must be below it.
    vocab: int
    eos_id: int | None = None  # Last token of a document in data of token ids, or None
    bad_lines: int = 0  # Maximum number of invalid records to skip
    ids_dtype: str = DEFAULT_IDS_DTYPE  # Dtype of token ids in files without a recorded dtype
    # Maximum bytes of a line, a row or a value
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES
    limit: int = 0  # Documents to read, counting a source and its target as one. 0 for all.

    def identity_inputs(
        self, data_type: DataType, without: Collection[IdentityChange]
    ) -> JsonObject:
        """Return the inputs of the identity of a store, without some changes since an earlier version."""
        inputs: JsonObject = {}
        if self.limit:
            inputs["max_examples"] = self.limit
        if self.bad_lines:
            inputs["bad_lines"] = self.bad_lines
            # Without `bad_lines`, earlier versions made no store of a file that is one list.
            if data_type in LIST_TYPES and IdentityChange.JSON_LISTS not in without:
                inputs["json_lists"] = True
        # The size limit decides which lines are skipped. If no line may be skipped, a line above the
        # limit is an error and no store is made, so the limit has no effect on the tokens.
        if self.bad_lines and self.max_document_nbytes != DEFAULT_MAX_DOCUMENT_NBYTES:
            inputs["max_document_bytes"] = self.max_document_nbytes
        if self.ids_dtype != DEFAULT_IDS_DTYPE:
            inputs["ids_dtype"] = self.ids_dtype
        return inputs


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The shards of data files.

    The files, one after the other, are a sequence of bytes. It is cut into ranges of equal size, and what ends in a
    range is in its shard: a record, a chunk of a text, or an undivided file. Ranges in which nothing can
    end have no shard. The layout is therefore a function of the sizes of the files.
    """

    range_nbytes: int  # Size of a range
    starts: Sequence[int]  # Start of each file
    ends: Sequence[int | None]  # End of each undivided file. None for divided files.
    ranges: Sequence[int]  # Number of the range of each shard, ascending
    nbytes: Sequence[int]  # Bytes of the data of each shard

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self.ranges)

    @property
    def digest(self) -> str:
        """Digest of the division. Equal layouts of equal files give equal shards."""
        inputs = [LAYOUT_VERSION, self.range_nbytes, self.starts, self.ends]
        return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())

    def find(self, file: int, end: int) -> int:
        """Return the shard of what ends at a byte of a file."""
        last = self.ends[file]
        if last is None:
            # A file that begins with an empty text ends nothing before its first byte.
            last = self.starts[file] + max(end, 1)
        return bisect_left(self.ranges, (last - 1) // self.range_nbytes)

    def start(self, file: int, shard: int) -> int:
        """Return the byte of a file before the parts of a shard."""
        if self.ends[file] is not None:
            return 0
        return max(0, self.ranges[shard] * self.range_nbytes - self.starts[file])

    def share(self, process: int, of: int) -> range:
        """Return the shards of one of several processes. The shares have about equal sizes."""
        ends = list(accumulate(self.nbytes, initial=0))
        bounds = [bisect_left(ends, ends[-1] * index / of) for index in (process, process + 1)]
        return range(min(bounds[0], self.n_shards), min(bounds[1], self.n_shards))


def divide_files(
    files: Sequence[DataFile], file_type: FileType, *, min_nbytes: int, max_shards: int
) -> ShardLayout:
    """Return the shards of data files: at most `max_shards` ranges of at least `min_nbytes`."""
    reader = READERS[file_type]
    starts = list(accumulate((file.nbytes for file in files), initial=0))
    range_nbytes = max(min_nbytes, -(-starts[-1] // max_shards))
    ends: list[int | None] = []
    nbytes: Counter[int] = Counter()
    for index, file in enumerate(files):
        if reader.divides(file):
            ends.append(None)
            for part in range(starts[index] // range_nbytes, -(-starts[index + 1] // range_nbytes)):
                low = max(starts[index], part * range_nbytes)
                nbytes[part] += min(starts[index + 1], (part + 1) * range_nbytes) - low
            continue
        end = starts[index + 1]
        # The digest of a companion is checked after both files are read, so both are in one shard.
        suffix = reader.companion_suffix
        if suffix and not str(file.path).endswith(suffix) and index + 1 < len(files):
            end = starts[index + 2]
        ends.append(end)
        nbytes[(end - 1) // range_nbytes] += file.nbytes
    ranges = sorted(nbytes)
    return ShardLayout(range_nbytes, starts, ends, ranges, [nbytes[part] for part in ranges])


@dataclass(slots=True)
class ShardReader:
    """Reads the examples of shards, in order and in bounded memory."""

    files: Sequence[DataFile]  # The files, with their digests
    file_type: FileType  # Type of the files. It selects their reader.
    builder: ExampleBuilder  # Builds an example of each record
    settings: RecordSettings  # Settings of reading
    layout: ShardLayout  # The shards of the files
    note: Note  # Called with messages about skipped records
    # Number of skipped invalid records of each shard, also of shards made before
    n_skipped: Counter[int] = field(default_factory=Counter[int])
    # Whether a shard is read, once its first part is reached. All parts of a shard are read, or none, whatever other
    # processes do meanwhile.
    is_read: dict[int, bool] = field(default_factory=dict[int, bool])

    def read(self, is_missing: Callable[[int], bool]) -> Iterator[tuple[int, Example]]:
        """Yield the examples of missing shards, each with its shard.

        Raises:
            PrepError: A file is invalid, cannot be read, or changed since it was hashed, or more
                records are invalid than `bad_lines`.
        """
        count = self.n_skipped.total()
        bad_lines = BadLines(self.settings.bad_lines, self.note, count=count)
        n_documents = 0
        for index, file in enumerate(self.files):
            for shard, example in self._read_file(index, is_missing, bad_lines):
                yield shard, example
                n_documents += example.ends_document
                if self.settings.limit and n_documents == self.settings.limit:
                    _check_unchanged(file)
                    bad_lines.report()
                    return
        bad_lines.report()

    def _read_file(
        self, index: int, is_missing: Callable[[int], bool], bad_lines: BadLines
    ) -> Iterator[tuple[int, Example]]:
        """Yield the examples of a file in missing shards."""
        file = self.files[index]
        shards = range(self.layout.find(index, 0), self.layout.find(index, file.nbytes) + 1)
        for shard in shards:
            if not is_missing(shard):
                self.is_read.setdefault(shard, False)
        missing = [shard for shard in shards if self.is_read.get(shard, True)]
        if not missing:
            return
        errors: list[PrepError] = []

        def skip_errors(shard: int) -> None:
            """Skip the invalid records before a valid one. They belong to its shard, as their bytes do."""
            for error in errors:
                bad_lines(error)
                self.n_skipped[shard] += 1
            errors.clear()

        def on_error(error: PrepError) -> None:
            errors.append(error)
            if len(errors) > self.settings.bad_lines:
                skip_errors(shards[-1])

        start = 0
        if not self.settings.bad_lines:
            # Otherwise the invalid records after the last valid one of an earlier shard would be skipped, too.
            start = self.layout.start(index, missing[0])
        options = ReadOptions(
            on_error, self.settings.ids_dtype, self.settings.max_document_nbytes, start
        )
        end = 0
        for piece in READERS[self.file_type].read(file, options):
            end += piece.nbytes
            shard = self.layout.find(index, end)
            if shard > missing[-1]:
                _check_unchanged(file)
                return
            if shard not in self.is_read:
                # Another process may have made it since the start of the file.
                self.is_read[shard] = is_missing(shard)
            if not self.is_read[shard]:
                errors.clear()
                continue
            skip_errors(shard)
            examples: Iterable[Example] = ()
            if isinstance(piece, IdsChunk):
                examples = _ids_examples(piece, self.settings)
            else:
                try:
                    examples = (self.builder.build(piece),)
                except PrepError as error:
                    on_error(error)
            for example in examples:
                yield shard, example
            skip_errors(shard)
        if self.is_read.setdefault(shards[-1], is_missing(shards[-1])):
            skip_errors(shards[-1])


def _check_unchanged(file: DataFile) -> None:
    """Raise PrepError if a local, partly read file changed since it was hashed."""
    if file.open_remote is None and hash_file(Path(file.path)) != file:
        raise changed_file_error(file.path)


def _ids_examples(chunk: IdsChunk, settings: RecordSettings) -> Iterator[Example]:
    """Yield the documents in a chunk of token ids. Raise PrepError if an id is out of range."""
    # A document ends after each end-of-sequence token, unless the chunk says otherwise, and where the
    # chunk says so. E.g. with eos 2, ids [5, 2, 7, 8] -> [5, 2] and [7, 8].
    ids = chunk.ids
    is_invalid = (ids < 0) | (ids >= settings.vocab)
    if is_invalid.any():
        position = int(np.argmax(is_invalid))
        what = f"{chunk.file}, token {chunk.first + position:,}: the id {int(ids[position]):,} is out of range"
        why = f"the vocabulary without padding has {settings.vocab:,} tokens"
        hint: Text | str = "make the ids with the tokenizer of this model"
        # Documents of Megatron-LM do not end at a token, and their index has the dtype.
        if chunk.file.endswith(".bin") and chunk.ends_at_eos:
            hint = text("{} sets the dtype of .bin files", Key("data.ids_dtype"))
        raise PrepError(what, why, hint)
    # -1 is no id: without an end token, only the end of the chunk ends a document.
    eos_id = -1
    if settings.eos_id is not None and chunk.ends_at_eos:
        eos_id = settings.eos_id
    ends_here = ids == eos_id
    bounds = [0, *(np.flatnonzero(ends_here[:-1]) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(bounds):
        segment = Segment(ids[start:end].astype(np.uint32))
        # An empty chunk has no last id, and always ends a document.
        ends_document = chunk.ends_document or bool(ends_here[end - 1])
        yield Example((segment,), (end - start) * ids.itemsize, ends_document=ends_document)
