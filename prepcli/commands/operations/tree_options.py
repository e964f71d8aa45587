"""Options for the parameter trees of other libraries, of `export` and of the commands with a tree as input.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from prepcli.core.option_spec import NOT_RECORDED, OptionSpec
from prepcli.planning.libraries import HF_LAYOUT, TREES, Layout

# Without the forms of the same trees with other layers.
_STACKED = [tree for tree in TREES if not tree.endswith("scanned")]


class SourceTreeOptions(TypedDict, total=False):
    """The layout of a tree to read."""

    source_layout: Annotated[
        str | None,
        OptionSpec(
            "TREE",
            f"Read the tree as native, {', '.join(_STACKED[:-1])} or {_STACKED[-1]}. Default: by its leaves.",
            "Layout of a checkpoint that another library wrote, by the names of `layout`, or native for prep's own."
            " Default: the one that fits the names and shapes of the leaves best.",
            position=23,
            record=66,
        ),
    ]


class TreeOptions(TypedDict, total=False):
    """Options for the tree of another library."""

    layout: Annotated[
        Layout,
        OptionSpec(
            "TREE",
            f"Write the tree of {HF_LAYOUT}, {', '.join(TREES[:-1])} or {TREES[-1]}.",
            '"hf" (safetensors, the default), "hf-flax" (Flax msgpack), "easylm" (stream), or a checkpoint of another '
            'trainer: "maxtext", "tunix", "levanter" or "torchtitan" (torch distributed '
            'checkpoint). "maxtext-unscanned" and "levanter-unscanned" have one leaf per layer, "easylm-scanned" has '
            "stacked layers.",
            default="hf",
            cli_type=str,
            position=3,
            record=2,
        ),
    ]
    format: Annotated[
        Literal["safetensors", "dcp", "msgpack", "stream", "orbax", "tensorstore"] | None,
        OptionSpec(
            "KIND",
            "Write safetensors, dcp, msgpack, stream, orbax or tensorstore. Default: by layout.",
            "Format of the files. Default: the first one of the layout. The layout hf has safetensors and dcp (torch "
            "distributed checkpoint).",
            cli_type=str,
            position=4,
            record=NOT_RECORDED,
        ),
    ]
