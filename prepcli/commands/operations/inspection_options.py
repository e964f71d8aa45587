"""The options of the operations that write no checkpoint of their own, e.g. inspect, verify, plan, report and env.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it. See `options.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypedDict, get_args

from prepcli.commands.operations.options import (
    TENSOR_MAP,
    VERBATIM,
    MapOptions,
    SourceOptions,
    SourceTreeOptions,
    StrictOptions,
)
from prepcli.core.option_spec import NOT_RECORDED, Minimum, OptionSpec, PathLike
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
_QUOTED_WAYS = ", ".join(f'"{way}"' for way in WAYS)

_SEARCH = OptionSpec(
    "FOLDER",
    "With --chain: find moved checkpoints in FOLDER. Repeatable.",
    "Folders with moved or renamed checkpoints. They are found by their digests.",
    default=(),
    position=22,
)
_ALLOW_UNPROVEN = OptionSpec(
    None,
    "With --chain: accept links with a missing source, or without a digest of it.",
    "Accept links with a missing source, or without a digest of it. Default: False.",
    default=False,
    position=22,
)
_PROMPT_IDS = OptionSpec(
    "FILE",
    "With --logits: comma-separated token ids, one prompt per line. Default: 16 and 512 random ids.",
    "File of comma-separated token ids, one prompt per line. Default: 16 and 512 random ids.",
    position=24,
)
_LOGITS_MESH = OptionSpec(
    "DP,FSDP,MP",
    "With --logits: compute on this device mesh. Default: one device.",
    '"dp,fsdp,mp" sizes or named axes. Default: the first device.',
    position=24,
)
_LIBRARY = OptionSpec(
    "prep|transformers",
    "With --logits: compute the second model with this library.",
    '"prep" (the default) or "transformers": the library that computes the second model.',
    default="prep",
    position=24,
)
Library = Literal["prep", "transformers"]


class InspectOptions(SourceOptions, MapOptions, SourceTreeOptions, total=False):
    """Options of `inspect`."""


class VerifyOptions(SourceOptions, MapOptions, SourceTreeOptions, StrictOptions, total=False):
    """Options of `verify`."""

    verbatim: Annotated[bool | None, replace(VERBATIM, record=NOT_RECORDED)]

    quick: Annotated[
        bool,
        OptionSpec(
            None,
            "Compare names, shapes and dtypes. Read no values.",
            "Compare names, shapes and dtypes only. No value is read. Default: False.",
            default=False,
            position=21,
        ),
    ]
    tolerance: Annotated[
        NonNegative | None,
        OptionSpec(
            "NUMBER",
            "Accept values that differ by at most NUMBER, in any dtype. List the differences of each tensor.",
            "Largest accepted difference between two values, whose dtypes may differ. Default: none, all bits are"
            " compared.",
            position=21,
        ),
    ]
    accept: Annotated[
        Sequence[PathLike],
        OptionSpec(
            "FILE",
            "Record the new digest of a settings or tokenizer file that you changed. Repeatable.",
            "Settings or tokenizer files of the checkpoint that you changed. Their new digests are"
            " recorded if nothing else differs.",
            default=(),
            position=21,
        ),
    ]


class ChainOptions(SourceOptions, total=False):
    """Options of `verify_chain`. The option `lock` applies to the first model of the chain."""

    search: Annotated[Sequence[PathLike], _SEARCH]
    allow_unproven: Annotated[bool, _ALLOW_UNPROVEN]


class ChainCommandOptions(TypedDict):
    """The options of `prep verify` for a chain. With `chain` the command calls `verify_chain`."""

    chain: Annotated[
        bool,
        OptionSpec(
            None,
            "Show by recorded digests from which checkpoints an output was made.",
            "Show from which checkpoints an output was made. Default: False.",
            default=False,
            position=21,
        ),
    ]
    search: Annotated[Sequence[PathLike], _SEARCH]
    allow_unproven: Annotated[bool, _ALLOW_UNPROVEN]


class LogitsOptions(SourceOptions, total=False):
    """Options of `verify_logits`."""

    tolerance: Annotated[
        NonNegative | None,
        OptionSpec(
            "NUMBER",
            "Accept logits that differ by at most NUMBER.",
            "Largest accepted difference between two logits. Default: 0.001.",
            position=21,
        ),
    ]
    prompt_ids: Annotated[PathLike | None, _PROMPT_IDS]
    library: Annotated[Library, _LIBRARY]
    mesh: Annotated[str | None, _LOGITS_MESH]


class LogitsCommandOptions(TypedDict):
    """The options of `prep verify` for logits. With `logits` the command calls `verify_logits`."""

    logits: Annotated[
        bool,
        OptionSpec(
            None,
            "Compare the logits and hidden states that both models compute.",
            "Compare the logits of both models. Default: False.",
            default=False,
            position=23,
        ),
    ]
    prompt_ids: Annotated[PathLike | None, _PROMPT_IDS]
    library: Annotated[Library, _LIBRARY]
    mesh: Annotated[str | None, _LOGITS_MESH]


class LockOptions(SourceOptions, total=False):
    """Options of `lock`."""

    overwrite: Annotated[
        bool,
        OptionSpec(
            None,
            "Replace a lock file that differs.",
            "Replace a lock file that differs. Default: False.",
            default=False,
            position=43,
        ),
    ]
    html: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write a page with the digests of the files.",
            "File of a page with the source, the files with their digests, and the tensors by dtype. Default: none.",
            position=44,
        ),
    ]


class RoundtripOptions(SourceOptions, total=False):
    """Options of `roundtrip`."""

    layout: Annotated[
        Sequence[Way],
        OptionSpec(
            "WAY",
            f"Take this way: {', '.join(WAYS[:-1])} or {WAYS[-1]}. Repeatable. Default: all.",
            f"Ways to take: {_QUOTED_WAYS}. Default: all.",
            default=(),
            position=1,
        ),
    ]
    overwrite: Annotated[
        bool,
        OptionSpec(
            None,
            "Replace a certificate that differs.",
            "Replace a certificate that differs. Default: False.",
            default=False,
            position=43,
        ),
    ]


class RoundtripArguments(TypedDict):
    """The argument `out` of `roundtrip`. It is an option of its command."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write to FILE. Default: NAME.roundtrip.json.",
            "The certificate.",
            position=40,
        ),
    ]


class LockArguments(TypedDict):
    """Argument of the function `lock` with an option on the command line: `--out`."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE", "Write to FILE. Default: NAME.lock.json.", "The lock file.", position=40
        ),
    ]


class SuggestMapOptions(SourceOptions, total=False):
    """Options of `suggest_map`."""

    overwrite: Annotated[
        bool,
        OptionSpec(
            None,
            "Replace a map that differs.",
            "Replace a map that differs. Default: False.",
            default=False,
            position=43,
        ),
    ]


class SuggestMapArguments(TypedDict):
    """The argument of `suggest_map` that is an option of its command."""

    out: Annotated[
        PathLike | None,
        OptionSpec("FILE", "Write to FILE. Default: NAME.map.", "The map.", position=40),
    ]


class ViewOptions(TypedDict):
    """What `prep inspect` shows: one of `tree`, `stats`, `shards` and `diff`, or a page with all of them."""

    sort: Annotated[
        SortKey,
        OptionSpec(
            "BY",
            "Sort by name, size or file (stored order).",
            'Order: "name", "size" or "file", the stored order. Default: "file".',
            default="file",
        ),
    ]
    tree: Annotated[
        bool,
        OptionSpec(
            None,
            "Print a tree with equal layers merged.",
            "Show a tree with equal layers merged. Default: False.",
            default=False,
        ),
    ]
    stats: Annotated[
        bool,
        OptionSpec(
            None,
            "Read the data. Print min, max, mean, NaN ….",
            "Read the data, and compute statistics of each tensor. Default: False.",
            default=False,
        ),
    ]
    shards: Annotated[
        str | None,
        OptionSpec("LEAF", "Draw the shards of a leaf on each device.", "Leaf to split by a mesh."),
    ]
    mesh: Annotated[
        str | None,
        OptionSpec(
            "DP,FSDP,MP",
            "Set the mesh of --shards or --html. Default: the source's.",
            "Mesh that splits the leaf. Default: the source's.",
        ),
    ]
    quantized: Annotated[
        Literal["keep", "dequantize"],
        OptionSpec(
            "keep|dequantize",
            "Show quantised weights as they are stored, or decoded.",
            '"keep" (the default) shows quantised weights as they are stored, "dequantize" their values.',
            default="keep",
        ),
    ]
    diff: Annotated[
        str | None,
        OptionSpec(
            "OTHER",
            "Compare names, shapes and dtypes.",
            "Checkpoint to compare names, shapes and dtypes with.",
        ),
    ]
    html: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write a page with the tree, shards, --stats and --diff.",
            "File of a page with the tree, the shards, and if asked for statistics and differences. Default: none.",
        ),
    ]


class PlanOptions(TypedDict, total=False):
    """Options of `plan`."""

    overrides: Annotated[
        str | Sequence[str],
        OptionSpec(
            "KEY=VALUE",
            "Override a key, for example data.seq_length=8192.",
            'Values in place of those of the recipe, such as "data.seq_length=8192".',
            default=(),
            flag="--set",
            position=1,
        ),
    ]
    mesh: Annotated[
        str | None,
        OptionSpec(
            "DP,FSDP,MP",
            "Plan for this device mesh. Default: the recipe's.",
            "Mesh of the devices. Default: the recipe's.",
            position=1,
        ),
    ]
    devices: Annotated[
        str | None,
        OptionSpec(
            "KIND[:N]",
            "Plan for N devices of KIND, for example v5p:256. N alone: of any kind. Default: all"
            " kinds.",
            'Kind and number of the devices, such as "v5p", "v5p:256" or "256". Default: all kinds.',
            position=1,
        ),
    ]
    html: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write a page with charts.",
            "File of a page with charts. Default: none.",
            position=3,
        ),
    ]
    config: Annotated[
        PathLike | None,
        OptionSpec(
            "PATH",
            "Read config.json from PATH, for a checkpoint without one.",
            "config.json, or its folder, in place of the checkpoint's.",
            position=4,
        ),
    ]
    map: Annotated[PathLike | None, replace(TENSOR_MAP, position=4)]
    offline: Annotated[
        bool,
        OptionSpec(
            None,
            "Use only the hub's cache.",
            "Use only the hub's cache. Default: False.",
            default=False,
            position=5,
        ),
    ]
    compile: Annotated[
        bool,
        OptionSpec(
            None,
            "Compile the step for --devices. Show XLA's memory and collectives.",
            "Compile the step for `devices`, for the memory and the collectives of XLA. Default:"
            " False.",
            default=False,
            position=6,
        ),
    ]
    compile_timeout: Annotated[
        Seconds | None,
        OptionSpec(
            "SECONDS",
            "End the compilation after SECONDS. Default: no limit.",
            "Time limit of the compilation in seconds. Default: none.",
            position=7,
        ),
    ]


class MeshSearchOptions(TypedDict, total=False):
    """The option `--search` of `prep plan`: the command then calls `fitting_meshes` instead of `plan`."""

    search: Annotated[
        bool,
        OptionSpec(
            None,
            "List the meshes on which the step fits.",
            "Search the meshes on which the step fits. Default: False.",
            default=False,
            position=2,
        ),
    ]


DEMO_FOLDER = Path("prep-demo")


class ReportOptions(TypedDict):
    """Arguments of the function `report` with an option on the command line."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write the page to FILE. Default: report.html in RUN, or here if RUN is a URL.",
            "The HTML file. Default: `report.html` in the folder of the first run.",
        ),
    ]


class RecipesOptions(TypedDict):
    """Options of `prep recipes`."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Copy to FILE. Default: NAME.toml.",
            "File of the copy. Default: the recipe's name with the suffix .toml.",
        ),
    ]


class DocsOptions(TypedDict):
    """Options of `prep docs`."""

    path: Annotated[
        bool,
        OptionSpec(
            None,
            "Print the path of the page instead of its text.",
            "Return the path of the page instead of its text. Default: False.",
            default=False,
        ),
    ]


class EnvOptions(TypedDict):
    """Options of `prep env`."""

    devices: Annotated[
        bool,
        OptionSpec(
            None,
            "Import jax and list its devices.",
            "Import jax and list its devices. Default: False.",
            default=False,
        ),
    ]


class DemoOptions(TypedDict):
    """Options of `prep demo`."""

    out: Annotated[
        PathLike,
        OptionSpec(
            "FOLDER",
            "Work in FOLDER.",
            'Folder of the demo. Default: "prep-demo".',
            default=DEMO_FOLDER,
        ),
    ]


class CheckFamilyOptions(TypedDict):
    """Options of `prep check-family`."""

    check: Annotated[
        Sequence[str],
        OptionSpec(
            "NAME",
            "Run only this check. Repeatable.",
            "Names of the checks to run. Default: all.",
            default=(),
        ),
    ]
