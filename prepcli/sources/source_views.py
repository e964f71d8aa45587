"""Other views of a source: with further files, with dims in another order, or with the averages of a run."""

from __future__ import annotations

from dataclasses import replace

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import Key, Option, PrepError, text, usage_error
from prepcli.models.parameters import parameter_rows
from prepcli.planning.tensors import (
    DECODED,
    OPT_STATE,
    PARAMS,
    SEPARATOR,
    is_leaf_path,
    qualify,
    split_name,
)
from prepcli.sources.source import Source, SourceTensor, source_axis_maps
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath

# The moving average of a run's parameters (`optimizer.ema`).
AVERAGE_SLOT = f"{OPT_STATE}.ema"


def append_files(source: Source, other: Source) -> Source:
    """Return a source with the files of another one after its own, e.g. an adapter's after its base's.

    Its tensors stay the same. To add a tensor of the other source, see `shift_file_numbers`.
    """
    blobs: tuple[AnyPath | Blob, ...] = ()
    if source.blobs or other.blobs:
        blobs = (*source.byte_sources, *other.byte_sources)
    return replace(
        source,
        files=(*source.files, *other.files),
        file_stamps=(*source.file_stamps, *other.file_stamps),
        blobs=blobs,
    )


def shift_file_numbers(tensor: SourceTensor, count: int) -> SourceTensor:
    """Return a tensor with `count` added to the numbers of the files that store it.

    Placements name files by number. After the files 0 to 2 of one source, file 0 of an appended source is file 3.
    """
    placement = tuple(location.moved(count) for location in tensor.placement)
    made_from = tuple(shift_file_numbers(stored, count) for stored in tensor.made_from)
    return replace(tensor, placement=placement, made_from=made_from)


def without_transposed_tensors(source: Source) -> Source:
    """Return a source with its transposed tensors in the order of dims of the text class of transformers.

    Files of Qwen3-VL-MoE have the experts as [experts, embed, 2 mlp] and [experts, mlp, embed]. The class of its text
    model reads [experts, 2 mlp, embed] and [experts, embed, mlp]. The tensors become views of the stored bytes, which
    have no digest in this order. Tensors with a digest are also read in the stored order, for a check.
    """
    family = source.family
    sizes = family.sizes(source.config)
    # Without shapes, a parameter has its usual form.
    names = {tensor.name: () for tensor in source.tensors}
    usual_rows = parameter_rows(family, source.config, tensors=names)
    # The stored dim of each usual dim, for each transposed tensor, e.g. (0, 2, 1).
    orders: dict[str, tuple[int, ...]] = {}
    for path, row in source_axis_maps(source).items():
        usual_dims = usual_rows[path].source_dims
        if row.source_dims != usual_dims:
            order = tuple(row.source_dims.index(dim) for dim in usual_dims)
            orders |= {name: order for name, _ in bind_row(row, sizes).tensors()}
    tensors: list[SourceTensor] = []
    checked: list[SourceTensor] = []
    for tensor in source.tensors:
        order = orders.get(tensor.name)
        if order is None:
            tensors.append(tensor)
            continue
        placement = tuple(location.permuted(order) for location in tensor.placement)
        shape = tuple(tensor.shape[dim] for dim in order)
        tensors.append(replace(tensor, shape=shape, placement=placement, digests=()))
        if tensor.digests:
            checked.append(replace(tensor, name=qualify(DECODED, tensor.name)))
    state_tensors = (*source.state_tensors, *checked)
    return replace(source, tensors=tuple(tensors), state_tensors=state_tensors)


def use_averaged_params(source: Source) -> Source:
    """Return the source of a training step with the averages as its parameters.

    The parameters become a part of the other training state.

    Raises:
        UsageError: The checkpoint has no averages.
        PrepError: Some of the parameters have no average.
    """
    hint = text("remove {}", Option("ema", True))
    averages: list[SourceTensor] = []
    others: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot != AVERAGE_SLOT:
            others.append(tensor)
            continue
        # The averages of a complete slot are named like the tensors of the parameters. A slot that
        # lacks parameters keeps the paths of its leaves (`sources.state_rows`).
        if is_leaf_path(name):
            why = text("a run with {} averages only the other parameters", Key("optimizer.freeze"))
            raise PrepError(
                f"{source.display_name} has averages of some parameters only", why, hint
            )
        averages.append(replace(tensor, name=qualify(PARAMS, name)))
    if not averages:
        why = text("{} was not set in the run's recipe", Key("optimizer.ema"))
        raise usage_error(f"{source.display_name} has no averaged parameters", why, hint)
    parameters = [
        replace(tensor, name=f"{PARAMS}{SEPARATOR}{tensor.name}") for tensor in source.tensors
    ]
    return replace(
        source, tensors=tuple(averages), state_tensors=(*parameters, *others), has_averages=True
    )
