"""`prep map suggest`: propose the rows of a map between two checkpoints, from the values of their tensors."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.conversion import CommonOptions, common_options, open_checkpoint
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.result_files import (
    check_result_path,
    has_content,
    write_result_file,
)
from prepcli.commands.operations.results import MapSuggestion
from prepcli.commands.operations.suggestion_options import SuggestMapOptions
from prepcli.core.errors import Option, PrepError, UsageError, text, usage_error
from prepcli.core.observer import Observer, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.core.progress import Progress
from prepcli.engine.blobs import open_blobs
from prepcli.engine.casts import parse_stream_digest
from prepcli.execution.output_urls import check_local_path
from prepcli.inspection.relation_rows import RowWriter, SuggestedRow, can_be_named
from prepcli.inspection.tree_relations import Relations, TensorTree, find_relations
from prepcli.models.registry import FAMILIES
from prepcli.planning.map_file import MAX_DROPS, MAX_LINES, compute_size, parse_map
from prepcli.planning.map_rows import MapCoverage, bind_map
from prepcli.planning.plan import Stream
from prepcli.planning.tensor_match import TensorInfo
from prepcli.planning.tensors import FLOAT_DTYPES, cast_dtype
from prepcli.restore.digest_checks import row_stream, stream_digests
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.mapped import map_tensors
from prepcli.sources.source import Source, SourceTensor

MAP_SUFFIX = ".map"
# Comments of one kind in the file. A map has as many `drop` lines at most.
MAX_COMMENTS = MAX_DROPS
# The other lines are sizes and comments.
MAX_ROWS = MAX_LINES - 4 * MAX_COMMENTS


@public
def suggest_map(
    checkpoint: PathLike,
    target: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[SuggestMapOptions],
) -> MapSuggestion:
    """Propose the rows of a map from one checkpoint to another one with the same values.

    Tensors are compared by value: whole, transposed, with merged or divided dims, stacked, and as parts of fused
    tensors. If all float tensors of the target have one dtype, values are cast to it first. Names decide between
    tensors of equal values. Each row is checked bit by bit before it is written.

    Args:
        checkpoint: The checkpoint to map: folder, alias, hub id, or `gs://`/`s3://` URL.
        target: A checkpoint with the names and shapes to map to.
        out: The map. Default: the checkpoint's name and `.map`, in the working directory.
        progress: Receives the bytes read. Default: none. See `Progress`.
        **options: See `SuggestMapOptions`.

    Returns:
        The rows, and the tensors without one. True in a condition if no tensor is left.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: The map exists with other content.
        PrepError: A checkpoint cannot be read, or no tensor of one has the values of the other.
    """
    observer = observer_of(progress)
    check_local_path(None if out is None else Path(out))
    common = replace(common_options(checkpoint, None, options), quantized="stored")
    located, source = _open(common, observer)
    if not source.family.is_verbatim:
        why = f"its tensors already have the names of family {source.family.name}"
        hint = "name the checkpoint of the other trainer first"
        raise usage_error(f"{source.display_name} needs no map", why, hint)
    target_common = replace(common, checkpoint=str(target), revision=None, config=None)
    _, target_source = _open(target_common, observer)
    path = Path(out) if out is not None else Path(f"{Path(located.model_name).name}{MAP_SUFFIX}")
    check_result_path(path)
    writer, relations = _relate(source, target_source, observer)
    with open_blobs(source.byte_sources) as first, open_blobs(target_source.byte_sources) as second:
        writer.first.files = first
        writer.second.files = second
        rows = list(writer.rows(relations.items))
    if len(rows) > MAX_ROWS:
        raise PrepError(
            f"the map of {source.display_name} needs {len(rows):,} rows",
            f"at most {MAX_ROWS:,} are supported",
            "number the tensors of all layers alike in both checkpoints, e.g. `layers.7.w`",
        )
    if rows:
        rows = _equal_rows(rows, writer, source, target_source, common.memory_nbytes, observer)
    if not rows:
        what = f"no tensor of {source.display_name} has the values of {target_source.display_name}"
        raise PrepError(
            what, "tensors are compared by their values", "name two copies of one model"
        )
    suggestion = _suggestion(path, rows, writer, relations)
    data = _map_text(suggestion, writer.sizes, source, target_source).encode()
    hint = text("{} replaces it", Option("overwrite", True))
    why = "its content differs"
    if not has_content(path, data, overwrite=options["overwrite"], why=why, hint=hint):
        write_result_file(path, data)
    return suggestion


def _open(common: CommonOptions, observer: Observer) -> tuple[LocatedCheckpoint, Source]:
    """Open a checkpoint with the names in its files."""
    try:
        return open_checkpoint(replace(common, verbatim=True), observer)
    except UsageError:
        # A converted checkpoint has no other names than those of its family. Other errors occur again.
        return open_checkpoint(replace(common, verbatim=None), observer)


def _relate(source: Source, target: Source, observer: Observer) -> tuple[RowWriter, Relations]:
    """Read both checkpoints once, and relate their tensors."""
    with open_blobs(source.byte_sources) as first, open_blobs(target.byte_sources) as second:
        trees = (
            TensorTree(_named_tensors(source), first, cast_to=_float_dtype(target)),
            TensorTree(_named_tensors(target), second),
        )
        progress = observer.progress()
        for tree, name in zip(trees, (source.display_name, target.display_name)):
            progress.begin(f"read {name}", sum(t.nbytes for t in tree.tensors.values()))
            try:
                tree.read_sums(progress.advance)
            finally:
                progress.end()
        return RowWriter(*trees), find_relations(*trees)


def _float_dtype(source: Source) -> str:
    """Return the dtype of all float tensors, or "" if there are several."""
    dtypes = {tensor.dtype for tensor in source.tensors if tensor.dtype in FLOAT_DTYPES}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _named_tensors(source: Source) -> dict[str, SourceTensor]:
    """Return the tensors of a verbatim source by name. Names without a place in a row are omitted."""
    tensors = {source.names.stored_name(tensor.name): tensor for tensor in source.tensors}
    return {name: tensor for name, tensor in tensors.items() if can_be_named(name)}


def _equal_rows(
    rows: Sequence[SuggestedRow],
    writer: RowWriter,
    source: Source,
    target: Source,
    memory_nbytes: int,
    observer: Observer,
) -> list[SuggestedRow]:
    """Return the rows with complete targets, equal bit by bit to the tensors of the target."""
    sizes: dict[str, int | tuple[int, ...]] = {}
    for atom, size in writer.sizes.items():
        sizes[atom] = compute_size(size, {})
    parsed = parse_map("suggestion", "\n".join(row.text for row in rows))
    bound, _ = bind_map(parsed, sizes, {})
    infos: dict[str, TensorInfo] = {}
    for name, tensor in writer.first.tensors.items():
        infos[name] = TensorInfo(tensor.dtype, tensor.shape, tensor.nbytes)
    coverage = MapCoverage(bound, infos)
    incomplete = coverage.incomplete_targets()
    complete_rows = [
        row for row, suggested in zip(bound, rows) if not incomplete & {*suggested.targets}
    ]
    mapped = {
        tensor.name: tensor for tensor in map_tensors(complete_rows, writer.first.tensors, None)
    }
    names = list(mapped)
    cast_to = writer.first.cast_to
    mapped_source = replace(source, tensors=tuple(mapped.values()))
    actual = _digests(
        mapped_source, [mapped[name] for name in names], memory_nbytes, observer, cast_to
    )
    wanted = [writer.second.tensors[name] for name in names]
    expected = _digests(target, wanted, memory_nbytes, observer)
    equal = {name for name, a, b in zip(names, actual, expected) if a == b}
    return [row for row in rows if equal >= {*row.targets}]


def _digests(
    source: Source,
    tensors: Sequence[SourceTensor],
    memory_nbytes: int,
    observer: Observer,
    cast_to: str = "",
) -> list[str]:
    """Return the digest of the values of each tensor, cast to a float dtype if one is given."""
    streams: list[Stream] = []
    for tensor in tensors:
        stream = row_stream(tensor, (0, tensor.shape[0] if tensor.shape else 1))
        dtype = cast_dtype(tensor.dtype, cast_to)
        if dtype != tensor.dtype:
            stream = replace(stream, cast_to=dtype)
        streams.append(stream)
    texts = stream_digests(
        source,
        streams,
        memory_nbytes,
        progress=observer.progress(),
        task=f"compare {source.display_name}",
    )
    return [parse_stream_digest(text).written for text in texts]


def _suggestion(
    path: Path, rows: Sequence[SuggestedRow], writer: RowWriter, relations: Relations
) -> MapSuggestion:
    """Return the result, with the tensors of both checkpoints without a row."""
    tree = writer.first
    is_cast = any(tree.compared_dtype(tensor) != tensor.dtype for tensor in tree.tensors.values())
    targets = {name for row in rows for name in row.targets}
    sources = {name for row in rows for name in row.sources}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for name, candidates in relations.ambiguous.items():
        if name in targets:
            ambiguous[name] = tuple(candidates)
    return MapSuggestion(
        path=path,
        rows=tuple(sorted(row.text for row in rows)),
        targets=len(targets),
        ambiguous=ambiguous,
        unmatched=tuple(sorted(writer.second.tensors.keys() - targets)),
        unused=tuple(sorted(writer.first.tensors.keys() - sources)),
        cast_to=tree.cast_to if is_cast else "",
    )


def _target_family(source: Source, target: Source) -> str:
    """Return the family of a target with the names of Hugging Face, or "".

    A map with a family needs the config of the mapped checkpoint.
    """
    name = target.config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES or not source.config:
        return ""
    has_names_of_family = bool(target.tensor_file_names) or not target.family.is_verbatim
    return name if has_names_of_family else ""


def _map_text(
    suggestion: MapSuggestion, sizes: Mapping[str, str], source: Source, target: Source
) -> str:
    """Return the content of the map: sizes, rows, and a comment for each tensor without a certain row."""
    lines = [f"# From {source.display_name} to {target.display_name}."]
    if suggestion.cast_to:
        lines.append(f"# Values are equal after a cast: --dtype {suggestion.cast_to}.")
    family = _target_family(source, target)
    if family:
        lines.append(f"family {family}")
    body = "\n".join(suggestion.rows)
    for atom in sorted(sizes):
        # Rows that were not equal may have had atoms of their own.
        if atom in body:
            lines.append(f"size {atom} = {sizes[atom]}")
    lines += ["", *suggestion.rows]
    comments: list[str] = []
    for name, candidates in suggestion.ambiguous.items():
        equal = ", ".join(candidates[1:]) or "none"
        comments.append(f"# {name} is {candidates[0]} by its name. Equal values: {equal}")
    lines += _shorten(comments)
    lines += _shorten([f"# no tensor has the values of {name}" for name in suggestion.unmatched])
    lines += _shorten([f"# drop {name}" for name in suggestion.unused])
    return "\n".join(lines) + "\n"


def _shorten(comments: Sequence[str]) -> list[str]:
    """Return the first comments, and the number of the others."""
    if len(comments) <= MAX_COMMENTS:
        return [*comments]
    return [*comments[:MAX_COMMENTS], f"# {len(comments) - MAX_COMMENTS:,} more"]
