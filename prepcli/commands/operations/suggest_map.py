"""`prep map suggest`: propose the rows of a map between two checkpoints, from the values of their tensors."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.inspection_options import SuggestMapOptions
from prepcli.commands.operations.opening import CommonOptions, common_options, open_checkpoint
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.result_files import (
    check_result_path,
    has_content,
    write_result_file,
)
from prepcli.commands.operations.results import MapSuggestion
from prepcli.core.errors import Option, PrepError, UsageError, text, usage_error
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.execution.output_urls import check_local_path
from prepcli.inspection.tensor_relations import Relations, RowWriter, TensorTree
from prepcli.models.registry import FAMILIES
from prepcli.planning.map_file import MAX_DROPS, MAX_LINES, MAX_NBYTES
from prepcli.planning.tensors import FLOAT_DTYPES, cast_dtype
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source

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

    Tensors are compared by the digests of their values: whole, and stacked along the first dim, each also transposed.
    If all float tensors of the target have one dtype, values are cast to it first. Tensors with equal values have
    rows only if their names are equal too. Parts of fused tensors have no rows.

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
        PrepError: A checkpoint cannot be read, or no tensor of one has the values of the other one.
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
    relations = Relations(
        TensorTree(source, common.memory_nbytes, observer, cast_to=_float_dtype(target_source)),
        TensorTree(target_source, common.memory_nbytes, observer),
    )
    relations.find()
    if not relations.items and not relations.ambiguous:
        what = f"no tensor of {source.display_name} has the values of {target_source.display_name}"
        raise PrepError(
            what, "tensors are compared by their values", "name two copies of one model"
        )
    writer = RowWriter()
    suggestion = _suggestion(path, writer.rows(relations.items), relations)
    data = _map_text(suggestion, writer.sizes, relations).encode()
    if len(suggestion.rows) > MAX_ROWS or len(data) > MAX_NBYTES:
        raise PrepError(
            f"the map of {source.display_name} needs {len(suggestion.rows):,} rows",
            f"at most {MAX_ROWS:,} rows and {MAX_NBYTES >> 20} MiB are supported",
            "number the tensors of all layers alike in both checkpoints, e.g. `layers.7.w`",
        )
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


def _float_dtype(source: Source) -> str:
    """Return the dtype of all float tensors, or "" if there are several."""
    dtypes = {tensor.dtype for tensor in source.tensors if tensor.dtype in FLOAT_DTYPES}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _suggestion(path: Path, rows: Iterable[str], relations: Relations) -> MapSuggestion:
    """Return the result, with the tensors of both checkpoints without a row."""
    first = relations.first
    targets = {relation.names[0] for relation in relations.items}
    sources = {relation.names[1] for relation in relations.items}
    dtypes = {tensor.dtype for tensor in first.tensors.values()}
    is_cast = any(cast_dtype(dtype, first.cast_to) != dtype for dtype in dtypes)
    return MapSuggestion(
        path=path,
        rows=tuple(sorted(rows)),
        targets=len(targets),
        ambiguous={name: tuple(names) for name, names in sorted(relations.ambiguous.items())},
        unmatched=tuple(sorted(relations.target.tensors.keys() - targets)),
        unused=tuple(sorted(first.tensors.keys() - sources)),
        cast_to=first.cast_to if is_cast else "",
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


def _map_text(suggestion: MapSuggestion, sizes: Mapping[str, str], relations: Relations) -> str:
    """Return the content of the map: sizes, rows, and a comment for each tensor without a row."""
    source = relations.first.source
    target = relations.target.source
    lines = [f"# From {source.display_name} to {target.display_name}."]
    if suggestion.cast_to:
        lines.append(f"# Values are equal after a cast: --dtype {suggestion.cast_to}.")
    family = _target_family(source, target)
    if family:
        lines.append(f"family {family}")
    lines += [f"size {atom} = {sizes[atom]}" for atom in sorted(sizes)]
    lines += ["", *suggestion.rows]
    ambiguous: list[str] = []
    for name, candidates in suggestion.ambiguous.items():
        why = f"its values occur several times, also in {', '.join(candidates)}"
        ambiguous.append(f"# {name} has no row: {why}")
    lines += _shorten(ambiguous)
    unmatched = [name for name in suggestion.unmatched if name not in suggestion.ambiguous]
    lines += _shorten([f"# no tensor has the values of {name}" for name in unmatched])
    unused = [name for name in suggestion.unused if name not in relations.candidates]
    lines += _shorten([f"# drop {name}" for name in unused])
    return "\n".join(lines) + "\n"


def _shorten(comments: Sequence[str]) -> list[str]:
    """Return the first comments, and the number of the others."""
    if len(comments) <= MAX_COMMENTS:
        return [*comments]
    return [*comments[:MAX_COMMENTS], f"# {len(comments) - MAX_COMMENTS:,} more"]
