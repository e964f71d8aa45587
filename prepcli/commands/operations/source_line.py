"""The line that describes a source to the user."""

from __future__ import annotations

from prepcli.core.counts import count_text
from prepcli.core.formatting import format_bytes
from prepcli.sources.source import Source
from prepcli.targets.streams import optimizer_nbytes


def source_line(source: Source) -> str:
    """Describe a source in one line: `EleutherAI/gpt-neo-1.3B  gpt_neo  316 tensors  4.90 GiB float32`."""
    # Decoded weights count as they are written.
    tensors = [tensor.cast(None) for tensor in (*source.tensors, *source.tower_tensors)]
    largest_nbytes = max((t.nbytes for t in tensors), default=0)
    # The scales of norms often stay float32 in a bfloat16 model. Their few bytes do not describe it: the
    # named dtypes have a tensor of at least 1/8 of the largest one.
    dtypes = sorted({t.dtype for t in tensors if t.nbytes * 8 >= largest_nbytes})
    size = format_bytes(sum(t.nbytes for t in tensors))
    parts = [
        source.display_name,
        _family_text(source),
        count_text(len(tensors), "tensor"),
        f"{size} {', '.join(dtypes)}",
    ]
    if source.quantization:
        stored = (*source.tensors, *source.tower_tensors)
        num_decoded = sum(bool(tensor.default_dtype) for tensor in stored)
        method = source.quantization.get("quant_method")
        parts.append(f"{num_decoded} decoded from {method}")
    if nbytes := optimizer_nbytes(source):
        parts.append(f"optimizer state {format_bytes(nbytes)}")
    if len(source.files) > 1:
        parts.append(count_text(len(source.files), "file"))
    return "  ".join(parts)


def _family_text(source: Source) -> str:
    """Return the family of a source, e.g. `llama in llava` for the text part of a multimodal model."""
    if source.wrapper is None or not source.is_multimodal:
        return source.family.name
    return f"{source.family.name} in {source.wrapper.config.get('model_type')!s:.60}"
