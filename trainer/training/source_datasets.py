"""The data of a run: shapes, sources, order of rows, and the tokens that the processes of a job make together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from prepcli.core.errors import PrepError, text, usage_error
from prepcli.core.json_values import is_json_list
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.stores.files import open_regular_file
from trainer.data.columns import (
    CONVERSATIONS,
    TEXT_COLUMN,
    Shape,
    check_columns,
    find_shapes,
    list_value,
    shapes_hint,
)
from trainer.data.dataset_layout import Selection
from trainer.data.files import OPENED_PREFIX, DataFile, Note, io_error
from trainer.data.find_files import NO_REMOTE_FILES, RemoteFiles, find_data_files, resolve_type
from trainer.data.order import MixedOrder, RowOrder, SampleOrder, mix_by_weight
from trainer.data.packing import ConcatenatedDataset, Dataset, DocumentDataset, PackedDataset
from trainer.data.readers import READERS
from trainer.data.readers.reader import Reader, ReadOptions, Record
from trainer.data.seq2seq import Seq2SeqDataset
from trainer.data.shards import (
    TokenizeProgress,
    complete_store,
    make_shards,
    read_valid_meta,
)
from trainer.data.store import MappedTokens, is_complete
from trainer.data.tokenize import (
    map_new_tokens,
    open_tokens,
    read_inputs,
    store_job,
    tokenize_files,
)
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
from trainer.distributed.agreement import folder_processes
from trainer.recipe.conflicts import chat_problems
from trainer.recipe.data_table import Data, split_sources
from trainer.recipe.text_fields import DEFAULT_FIELDS, PLAIN


@dataclass(frozen=True, slots=True)
class Datasets:
    """Training and evaluation datasets of a run."""

    train: Dataset  # Rows to train on
    evaluation: Dataset | None  # Rows to evaluate on. None without evaluation.
    identity: str  # Digest of the tokens of both, compared on resume
    # Weight of each source of a mixture. The rows of its sources are concatenated. Empty if the rows have one
    # order.
    weights: tuple[float, ...] = ()


# Builds the datasets of one source from its data table, which has no sources itself. The second
# argument is the name of the source in a mixture, or empty.
BuildSource: TypeAlias = Callable[[Data, str, Note], Datasets]


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The token store of a dataset, and how its documents become rows."""

    tokens: MappedTokens  # The store
    source_length: int  # Maximum tokens of a source. 0 without an encoder.
    has_blocks: bool  # Whether documents are concatenated and cut into blocks


def token_stores(train: Dataset) -> dict[str, TokenStore]:
    """Return the token store of each source by name, `train` without a mixture. Span corruption has none."""
    parts: Mapping[str, Dataset] = {"train": train}
    if isinstance(train, ConcatenatedDataset):
        parts = train.parts
    stores: dict[str, TokenStore] = {}
    for name, part in parts.items():
        if isinstance(part, Seq2SeqDataset):
            stores[name] = TokenStore(part.tokens, part.source_length, has_blocks=False)
        elif isinstance(part, PackedDataset | DocumentDataset):
            has_blocks = isinstance(part, PackedDataset)
            stores[name] = TokenStore(part.tokens, 0, has_blocks=has_blocks)
    return stores


def train_selection(data: Data) -> Selection:
    """Return the part of a dataset to train on."""
    return Selection(data.config, data.split, data.revision)


def eval_selection(data: Data) -> Selection:
    """Return the part of a dataset to evaluate on: another split of the training data, or of `eval_path`."""
    if data.eval_path is None:
        return replace(train_selection(data), split=data.eval_split, split_key="eval_split")
    return Selection(split=data.eval_split, split_key="eval_split")


def build_mixture(data: Data, build: BuildSource, *, note: Note) -> Datasets:
    """Return the datasets of a recipe: of its only source, or of all its sources together.

    Args:
        data: Data of the recipe.
        build: Builds the datasets of one source.
        note: Called with messages for the user.

    Raises:
        PrepError: The data is invalid.
    """
    if data.sources is None:
        return build(data, "", note)
    datasets: dict[str, Datasets] = {}
    weights: dict[str, float] = {}
    for source, part in split_sources(data):
        assert source is not None
        with _label_errors(source.name):
            datasets[source.name] = build(part, source.name, _label_notes(source.name, note))
        if source.weight is not None:
            weights[source.name] = source.weight
    train = {name: part.train for name, part in datasets.items()}
    evaluation = {
        name: part.evaluation for name, part in datasets.items() if part.evaluation is not None
    }
    for line in _describe_mixture(train, weights):
        note(line)
    return Datasets(
        train=ConcatenatedDataset(train),
        evaluation=ConcatenatedDataset(evaluation) if evaluation else None,
        identity=" ".join(part.identity for part in datasets.values()),
        weights=tuple(weights.values()),
    )


@contextmanager
def _label_errors(name: str) -> Iterator[None]:
    """Prefix PrepErrors raised in the block with the name of the data source."""
    try:
        yield
    except PrepError as error:
        what = text("source `{}`: {}", name, error.what)
        raise error.with_texts(what=what) from error.__cause__


def _label_notes(name: str, note: Note) -> Note:
    return lambda text: note(f"{name}: {text}")


def _describe_mixture(train: dict[str, Dataset], weights: dict[str, float]) -> list[str]:
    """Return a line per source: its sequences, and how often one epoch of the mixture takes them.

    An epoch of the mixture has as many sequences as all sources together.
    """
    n_rows = sum(part.n_rows for part in train.values())
    total = sum(weights.values())
    lines: list[str] = []
    for name, part in train.items():
        share = weights[name] / total if weights else part.n_rows / n_rows
        epochs = share * n_rows / part.n_rows
        lines.append(
            f"{name}: {100 * share:.4g} % of {part.n_rows:,} sequences, {epochs:.4g} times in an epoch"
        )
    return lines


def make_order(datasets: Datasets, batch_size: int, *, seed: int, shuffle: bool) -> RowOrder:
    """Return the order of the training rows.

    Args:
        datasets: The datasets.
        batch_size: Rows of a step.
        seed: Seed of the permutations.
        shuffle: Permute the rows of each epoch.
    """
    train = datasets.train
    if not datasets.weights:
        return SampleOrder(train.n_rows, batch_size, seed, shuffle)
    assert isinstance(train, ConcatenatedDataset)
    source_rows = tuple(part.n_rows for part in train.parts.values())
    return MixedOrder(
        source_rows, mix_by_weight(datasets.weights), batch_size, seed=seed, shuffle=shuffle
    )


def tokens_by_source(
    order: RowOrder, train: Dataset, step: int, *, tokens_per_row: int
) -> dict[str, int]:
    """Return the tokens of each source in the first steps, by metric name.

    Empty without a mixture.
    """
    if not isinstance(order, MixedOrder) or not isinstance(train, ConcatenatedDataset):
        return {}
    counts = order.source_counts(step)
    tokens: dict[str, int] = {}
    for name, count in zip(train.parts, counts):
        tokens[f"tokens.{name}"] = tokens_per_row * count
    return tokens


# The format and the columns of data whose recipe names neither: those of the first record.

ONE_PROCESS = SingleProcess()


def find_data_shape(
    data: Data,
    *,
    remote: RemoteFiles = NO_REMOTE_FILES,
    group: ProcessGroup = ONE_PROCESS,
    is_only: bool = True,
    note: Note,
) -> Data:
    """Return data with a format and its fields: those of the recipe, or those that its columns name.

    All processes call it together. Process 0 reads the first record, as only its host may have the files.

    Args:
        data: Data of one source.
        remote: Finds the files of URLs.
        group: The processes of the job.
        is_only: Whether it is the only source of the run.
        note: Called with a message about the shape.

    Raises:
        UsageError: The columns fit several shapes, or keys of the recipe do not fit the shape.
        PrepError: The first record is invalid.
    """
    if not data.has_auto_shape:
        return data
    resolved = data
    if group.index == 0:
        resolved = _read_shape(data, remote, note)
    answer = group.broadcast("shape of the data", f"{resolved.format} {resolved.fields or ''}")
    data_format, _, fields = answer.partition(" ")
    resolved = data.model_copy(update={"format": data_format, "fields": fields or None})
    for problem in chat_problems(resolved, is_only=is_only):
        raise usage_error(problem.what, problem.why, problem.hint)
    return resolved


def _read_shape(data: Data, remote: RemoteFiles, note: Note) -> Data:
    """Return data with the shape of its first record. Files without columns have the format `text`."""
    files = find_data_files(data.path or (), data.type, train_selection(data), remote=remote)
    file_type = resolve_type(files, data.type)
    shape = Shape(PLAIN, DEFAULT_FIELDS.get(file_type, ""))
    found = None
    if file_type in DEFAULT_FIELDS:
        found = _first_shape(data, files, READERS[file_type])
    if found is not None:
        shape, has_json = found
        lists = ""
        if has_json:
            lists = ", with lists as JSON texts"
        note(f"found by the columns: {shape.keys()}{lists}")
    return data.model_copy(update={"format": shape.format, "fields": shape.fields or None})


def _first_shape(
    data: Data, files: Sequence[Path | DataFile], reader: Reader
) -> tuple[Shape, bool] | None:
    """Return the shape of the first record, and whether its lists are JSON texts. None without a shape.

    Invalid records, and records in no shape, are skipped if the recipe allows some.
    """
    for record in itertools.islice(_read_records(data, files, reader), data.bad_lines + 1):
        shapes = find_shapes(record.values)
        if len(shapes) > 1:
            names = ", ".join(f"`{name}`" for name in record.values)
            why = f"its columns fit several shapes: {names}"
            what = f"{record.place}: the shape of the data is not clear"
            raise usage_error(what, why, text("choose {}", shapes_hint(shapes)))
        if shapes:
            has_json = any(is_json_list(record.values.get(name)) for name in shapes[0].list_columns)
            return shapes[0], has_json
        if not data.bad_lines:
            _check_record(record)
    return None


def _check_record(record: Record) -> None:
    """Raise PrepError if a record in no shape has conversations that are not a JSON list, or no text."""
    for name in CONVERSATIONS:
        if is_json_list(record.values.get(name)):
            list_value(record, name, "messages")
    check_columns(record, [TEXT_COLUMN])


def _read_records(data: Data, files: Sequence[Path | DataFile], reader: Reader) -> Iterator[Record]:
    """Yield the records of files. Invalid ones are skipped if the recipe allows any."""

    def on_error(error: PrepError) -> None:
        if not data.bad_lines:
            raise error

    options = ReadOptions(on_error, max_document_nbytes=data.max_document_bytes)
    for file in files:
        if isinstance(file, Path):
            if not file.stat().st_size:
                continue
            # The file is not read to its end, so it has no digest to compare.
            file = DataFile(file, file.stat().st_size, "", partial(open_regular_file, file))
        for piece in reader.read(file, options):
            assert isinstance(piece, Record)
            yield piece


# Tokens that the processes of a job make together, or wait for.

# Names of exchanges between processes.
MISSING_TOKENS = "tokens are missing"
TOKEN_SHARDS = "token shards"
RECORDED_TOKENS = "recorded tokens"


def tokenize_in_group(
    config: TokenizeConfig, group: ProcessGroup, *, progress: TokenizeProgress, note: Note
) -> MappedTokens:
    """Return the tokens of the configured files.

    All processes call it together. If the hosts share the cache, the first process of each host
    makes a share of the tokens. Otherwise process 0 makes them, and the first process of each host
    without the cache of process 0. All other processes wait, then open the tokens without reading
    the data files. With a scratch folder, each process makes the tokens that are missing in the
    cache.

    Args:
        config: Files, tokenizer and cache. All processes use the recorded tokens of process 0.
        group: The processes of the job.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens cannot be made, or the hosts have different data files.
    """
    encoded = group.broadcast(RECORDED_TOKENS, config.recorded.encode() if config.recorded else "")
    # Another process may not see the run that has recorded the tokens.
    config = replace(config, recorded=RecordedTokens.decode(encoded) if encoded else None)
    if config.scratch_dir is not None:
        return tokenize_files(config, progress=progress, note=note)
    if group.count == 1:
        return tokenize_files(config, progress=progress, note=note)
    if group.index == 0:
        try:
            config.cache.mkdir(parents=True, exist_ok=True)
            (config.cache / OPENED_PREFIX).touch()
        except OSError as error:
            raise io_error(config.cache, error) from error
    tokens = None
    processes = folder_processes(config.cache, group)
    if processes.is_shared and len(processes.host_leaders) > 1:
        tokens = _tokenize_on_hosts(
            config, group, processes.host_leaders, progress=progress, note=note
        )
    elif group.index in processes.writers:
        tokens = tokenize_files(config, progress=progress, note=note)
    # Process 0 waits here until all tokens are complete. Other processes wait in the broadcast below.
    identities = group.gather("tokens", tokens.identity if tokens else "")
    if group.index == 0:
        _check_equal(identities)
    identity = group.broadcast("identity of the tokens", tokens.identity if tokens else "")
    return tokens or open_tokens(config, identity, note=note)


def _tokenize_on_hosts(
    config: TokenizeConfig,
    group: ProcessGroup,
    leaders: Sequence[int],
    *,
    progress: TokenizeProgress,
    note: Note,
) -> MappedTokens | None:
    """Return the tokens on process 0, and None elsewhere. The first process of each host makes a share."""
    if group.index > 0:
        has_work = group.broadcast(MISSING_TOKENS, "") == str(True)
        if has_work and group.index in leaders:
            # A host without the data files makes no share. Process 0 makes what is missing in the
            # end, and reports the error of invalid data.
            with suppress(PrepError):
                place = leaders.index(group.index)
                job = store_job(read_inputs(config, note, place, len(leaders)))
                share = job.share(place, len(leaders))
                make_shards(job, share, progress=progress, note=note)
        group.barrier(TOKEN_SHARDS)
        return None
    # Process 0 reads all files for their digests. The others find its record.
    inputs = read_inputs(config, note)
    job = store_job(inputs)
    has_work = not is_complete(job.folder)
    group.broadcast(MISSING_TOKENS, str(has_work))
    if has_work:
        share = job.share(0, len(leaders))
        make_shards(job, share, progress=progress, note=note)
    group.barrier(TOKEN_SHARDS)
    meta = read_valid_meta(job.folder, note, reopens=True)
    if meta is None:
        make_shards(job, range(job.layout.n_shards), progress=progress, note=note)
        meta = complete_store(job, progress=progress, note=note)
    return map_new_tokens(job.folder, meta, inputs.config, inputs.tokenizer, note)


def _check_equal(identities: Sequence[str]) -> None:
    """Raise PrepError if two hosts made different tokens."""
    other = next(
        (index for index, identity in enumerate(identities) if identity not in ("", identities[0])),
        None,
    )
    if other is not None:
        what = f"the data of process {other} differs from the data of process 0"
        why = f"its tokens are {identities[other]}, process 0 has {identities[0]}"
        raise PrepError(
            what,
            why,
            "use the same files in `data.path` on all hosts, or put them on a shared file system",
        )
