"""Lines and fields of `prep inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prepcli.console.formatting import count_text, format_bytes
from prepcli.inspection.contents import CheckpointContents, TensorEntry, nbytes_below
from prepcli.planning.state_names import OPT_STATE, PARAMS
from prepcli.sources.source import CONFIG

ShapeAndDtype = tuple[tuple[int, ...], str]


MAX_NON_ARRAYS = 24  # lines; a malformed index may list any number
FORMAT_TITLES = {  # of the kinds whose own name is not the title
    "torch": "PyTorch",
    "meta": "PyTorch in Meta's layout",
    "flax": "Flax msgpack",
    "easylm": "EasyLM stream",
    "adapter": "adapter of PEFT",
}


def header_lines(contents: CheckpointContents, source: Mapping[str, Any]) -> list[str]:
    """Describe the model and its storage in one line each, and the first entries that are not arrays."""
    size_in_values = (
        f"{source['parameters']:,} parameters"
        if source["parameters"]
        else f"{source['values']:,} values"
    )
    size = f"{format_bytes(sum(entry.nbytes for entry in contents.entries))} {', '.join(source['dtypes'])}".rstrip()
    model = "  ".join([source["name"], _family_text(contents), size_in_values, size])
    kind = FORMAT_TITLES.get(contents.kind, contents.kind)
    stored = [
        f"{kind}, {count_text(source['files'], 'file')}, {count_text(source['tensors'], 'tensor')}"
    ]
    if contents.kind == "orbax":
        leaves = f"{count_text(source['tensors'], 'leaf', 'leaves')} in {count_text(source['chunks'], 'chunk')}"
        codecs = f" ({', '.join(contents.codecs)})" if contents.codecs else ""
        stored = [f"Orbax{codecs}, {count_text(source['files'], 'data file')}, {leaves}"]
        stored += [f"mesh {source['mesh']}"] if source["mesh"] else []
        stored += [_layout_text(source)] if source["layout"] else []
        stored += [_step_text(contents)] if source["step"] is not None else []
    if vocab := source["vocab"]:
        true_text = f" ({vocab['true']} true)" if vocab["true"] != vocab["padded"] else ""
        stored.append(f"vocabulary {vocab['padded']}{true_text}")
    if contents.adapter:
        stored.append(_adapter_text(contents.adapter))
    num_omitted = len(contents.non_arrays) - MAX_NON_ARRAYS
    extra_lines = [
        *contents.non_arrays[:MAX_NON_ARRAYS],
        *([f"and {num_omitted:,} more that are not arrays"] if num_omitted > 0 else []),
    ]
    return [model, "; ".join(stored), *extra_lines]


def _adapter_text(adapter: Mapping[str, Any]) -> str:
    """Return the settings of an adapter, such as `LoRA adapter, rank 8, alpha 16, scaled by 2`."""
    base = f" of {adapter['base']:.100}" if adapter["base"] else ""
    return f"LoRA adapter{base}, rank {adapter['rank']}, alpha {adapter['alpha']:g}, scaled by {adapter['scaling']:g}"


def _family_text(contents: CheckpointContents) -> str:
    if contents.kind == "adapter":
        return "adapter"
    if contents.family is not None:
        return contents.family.name
    model_type = contents.config.get("model_type")
    if isinstance(model_type, str):
        return f"{model_type} (unknown family)"
    # Files of Flax are often copied without the config that they need.
    needs_config = contents.kind in ("flax", "easylm") and not contents.config
    return f"unknown family (no {CONFIG}: `--config PATH`)" if needs_config else "unknown family"


def _layout_text(source: Mapping[str, Any]) -> str:
    stacked = (
        f"layers stacked on axis {source['scan_axis']}" if source["scan"] else "one leaf per layer"
    )
    return f"layout {source['layout']}, {stacked}"


def _step_text(contents: CheckpointContents) -> str:
    params, state = (format_bytes(nbytes_below(contents, root)) for root in (PARAMS, OPT_STATE))
    return f"step {contents.manifest.step}: parameters {params}, optimizer state {state}"


def count_line(contents: CheckpointContents, entries: Sequence[TensorEntry]) -> str:
    """Describe how many tensors a pattern selected, and their size."""
    size = format_bytes(sum(entry.nbytes for entry in entries))
    return f"{len(entries):,} of {len(contents.entries):,} tensors, {size}"


def shape_fields(shape: ShapeAndDtype | None) -> dict[str, Any] | None:
    """Return a shape and dtype for the JSON object."""
    return {"shape": shape[0], "dtype": shape[1]} if shape else None


def difference_line(
    name: str,
    a_shape: ShapeAndDtype | None,
    b_shape: ShapeAndDtype | None,
    *,
    a_name: str,
    b_name: str,
) -> str:
    """Describe the difference of one tensor between two checkpoints."""
    if a_shape and b_shape:
        return f"differs  {name}  {_shape_text(a_shape)} -> {_shape_text(b_shape)}"
    if a_shape:
        return f"only in {a_name}  {name}  {_shape_text(a_shape)}"
    return f"only in {b_name}  {name}  {_shape_text(b_shape)}"


def _shape_text(shape: ShapeAndDtype | None) -> str:
    return f"{list(shape[0])} {shape[1]}" if shape else ""
