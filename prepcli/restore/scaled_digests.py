"""Digests of tensors with a scale in the layout of another trainer, such as MaxText's queries."""

from __future__ import annotations

from dataclasses import replace

from prepcli.algebra.boxes import Range
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.layout_scales import LayoutScale, recorded_scale
from prepcli.planning.plan import Stream
from prepcli.planning.state_names import qualify, split_name
from prepcli.restore.digest_checks import row_stream
from prepcli.sources.source import Source, SourceTensor


def stored_scale(output: Source, name: str) -> LayoutScale | None:
    """Return the scale of the stored values of a tensor. See `SourceHints.kept_scales`.

    Args:
        output: The output, opened with its stored values.
        name: Name of the tensor in `output.all_tensors`, e.g. of a moment.
    """
    manifest = output.manifest or NO_MANIFEST
    slot, tensor = split_name(name)
    record = manifest.scales.get(qualify(slot, output.names.full_name(tensor)))
    # The opener of Orbax items compares the records with the layout. Other formats have no scale.
    if record is None or not manifest.lost_values or output.tensor_file_names:
        return None
    return recorded_scale(record, record["significant"])


def written_stream(
    tensor: SourceTensor, rows: Range, dtype: str, scale: LayoutScale | None
) -> Stream:
    """Return a stream of the rows of an output: scaled, and cast to its dtype.

    Args:
        tensor: The tensor of the source.
        rows: The rows.
        dtype: Dtype in the output.
        scale: Scale of the values in the output, or None.
    """
    stream = row_stream(tensor, rows)
    if dtype != stream.dtype:
        stream = replace(stream, cast_to=dtype)
    return replace(stream, scale=scale)
