"""The options of the operations that write no checkpoint of their own, e.g. inspect, verify, plan, report and env.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it. See `options.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypedDict, get_args

from prepcli.commands.operations.options import (
    TENSOR_MAP,
    VERBATIM,
    MapOptions,
    SourceOptions,
    SourceTreeOptions,
    StrictOptions,
)
from prepcli.core.option_spec import NOT_RECORDED, Minimum, PathLike, flag, option
from prepcli.planning.libraries import Tree

SortKey = Literal["name", "size", "file"]
Seconds = Annotated[float, Minimum(0.01)]
NonNegative = Annotated[float, Minimum(0.0)]

Way = Literal[
    "init",
    "no-scan",
    "scan-axis",
    "mesh",
    "compress",
    "pad",
    "verbatim",
    Tree,
    "dcp",
    "files",
    "zarr3",
    "zarr3-files",
]
WAYS: tuple[Way, ...] = get_args(Way)

Library = Literal["prep", "transformers"]


class InspectOptions(SourceOptions, MapOptions, SourceTreeOptions, total=False):
    """Options of `inspect`."""


class VerifyOptions(SourceOptions, MapOptions, SourceTreeOptions, StrictOptions, total=False):
    """Options of `verify`."""

    verbatim: Annotated[bool | None, replace(VERBATIM, record=NOT_RECORDED)]

    quick: Annotated[bool, flag("Compare names, shapes and dtypes. Read no values.", position=21)]
    tolerance: Annotated[
        NonNegative | None,
        option(
            "NUMBER",
            "Accept values that differ by at most NUMBER, in any dtype. List the differences of each tensor.",
            position=21,
        ),
    ]
    accept: Annotated[
        Sequence[PathLike],
        option(
            "FILE",
            "Record the new digest of a settings or tokenizer file that you changed. Repeatable.",
            default=(),
            position=21,
        ),
    ]


class ChainOptions(SourceOptions, total=False):
    """Options of `verify_chain`. The option `lock` applies to the first model of the chain."""

    search: Annotated[
        Sequence[PathLike],
        option(
            "FOLDER",
            "With --chain: find moved checkpoints in FOLDER. Repeatable.",
            default=(),
            position=22,
        ),
    ]
    allow_unproven: Annotated[
        bool,
        flag(
            "With --chain: accept links with a missing source, or without a digest of it.",
            position=22,
        ),
    ]


class LogitsOptions(SourceOptions, total=False):
    """Options of `verify_logits`."""

    tolerance: Annotated[
        NonNegative | None,
        option(
            "NUMBER",
            "Accept logits that differ by at most NUMBER.",
            more="Default: 0.001.",
            position=21,
        ),
    ]
    prompt_ids: Annotated[
        PathLike | None,
        option(
            "FILE",
            "With --logits: comma-separated token ids, one prompt per line. Default: 16 and 512 random ids.",
            position=24,
        ),
    ]
    library: Annotated[
        Library,
        option(
            "prep|transformers",
            "With --logits: compute the second model with this library.",
            default="prep",
            position=24,
        ),
    ]
    mesh: Annotated[
        str | None,
        option(
            "DP,FSDP,MP",
            "With --logits: compute on this device mesh. Default: one device.",
            position=24,
        ),
    ]


class LockOptions(SourceOptions, total=False):
    """Options of `lock`."""

    overwrite: Annotated[bool, flag("Replace a lock file that differs.", position=43)]
    html: Annotated[
        PathLike | None, option("FILE", "Write a page with the digests of the files.", position=44)
    ]


class RoundtripOptions(SourceOptions, total=False):
    """Options of `roundtrip`."""

    layout: Annotated[
        Sequence[Way],
        option(
            "WAY",
            f"Take this way: {', '.join(WAYS[:-1])} or {WAYS[-1]}. Repeatable. Default: all.",
            default=(),
            position=1,
        ),
    ]
    overwrite: Annotated[bool, flag("Replace a certificate that differs.", position=43)]


class SuggestMapOptions(SourceOptions, total=False):
    """Options of `suggest_map`."""

    overwrite: Annotated[bool, flag("Replace a map that differs.", position=43)]


class ViewOptions(TypedDict):
    """What `prep inspect` shows: one of `tree`, `stats`, `shards` and `diff`, or a page with all of them."""

    sort: Annotated[
        SortKey, option("BY", "Sort by name, size or file (stored order).", default="file")
    ]
    tree: Annotated[bool, flag("Print a tree with equal layers merged.")]
    stats: Annotated[bool, flag("Read the data. Print min, max, mean, NaN ….")]
    shards: Annotated[str | None, option("LEAF", "Draw the shards of a leaf on each device.")]
    mesh: Annotated[
        str | None,
        option("DP,FSDP,MP", "Set the mesh of --shards or --html. Default: the source's."),
    ]
    quantized: Annotated[
        Literal["keep", "dequantize"],
        option(
            "keep|dequantize",
            "Show quantised weights as they are stored, or decoded.",
            default="keep",
        ),
    ]
    diff: Annotated[str | None, option("OTHER", "Compare names, shapes and dtypes.")]
    html: Annotated[
        PathLike | None, option("FILE", "Write a page with the tree, shards, --stats and --diff.")
    ]


class PlanOptions(TypedDict, total=False):
    """Options of `plan`."""

    overrides: Annotated[
        str | Sequence[str],
        option(
            "KEY=VALUE",
            "Override a key, for example data.seq_length=8192.",
            default=(),
            position=1,
        ),
    ]
    mesh: Annotated[
        str | None,
        option("DP,FSDP,MP", "Plan for this device mesh. Default: the recipe's.", position=1),
    ]
    devices: Annotated[
        str | None,
        option(
            "KIND[:N]",
            "Plan for N devices of KIND, for example v5p:256. N alone: of any kind. Default: all"
            " kinds.",
            position=1,
        ),
    ]
    html: Annotated[PathLike | None, option("FILE", "Write a page with charts.", position=3)]
    config: Annotated[
        PathLike | None,
        option("PATH", "Read config.json from PATH, for a checkpoint without one.", position=4),
    ]
    map: Annotated[PathLike | None, replace(TENSOR_MAP, position=4)]
    offline: Annotated[bool, flag("Use only the hub's cache.", position=5)]
    compile: Annotated[
        bool,
        flag(
            "Compile the step for --devices. Show XLA's memory and collectives.",
            position=6,
        ),
    ]
    compile_timeout: Annotated[
        Seconds | None,
        option("SECONDS", "End the compilation after SECONDS. Default: no limit.", position=7),
    ]
