"""The options of the operations, each defined once.

The field of an option has its type, its default and its texts. From them come the keyword of the Python function, the
option of the command line, the command line that a manifest records, and the reference pages.

To add an option, add a field here and read `options["NAME"]` in the operation:

    class SaveInitOptions(...):
        layers: Annotated[PositiveInt | None, option("N", "Convert the first N layers.")]

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypedDict

from prepcli.core.option_spec import REQUIRED, NonNegativeInt, PathLike, PositiveInt, flag, option
from prepcli.formats.codecs import WRITTEN_CODECS
from prepcli.planning.item_storage import StorageName
from prepcli.planning.libraries import HF_LAYOUT, TREES, Layout

# Without the forms of the same trees with other layers.
_STACKED = [tree for tree in TREES if not tree.endswith("scanned")]


class SourceTreeOptions(TypedDict, total=False):
    """The layout of a tree to read."""

    source_layout: Annotated[
        str | None,
        option(
            "TREE",
            f"Read the tree as native, {', '.join(_STACKED[:-1])} or {_STACKED[-1]}. Default: by its leaves.",
            position=23,
            record=66,
        ),
    ]


class TreeOptions(TypedDict, total=False):
    """Options for the tree of another library."""

    layout: Annotated[
        Layout,
        option(
            "TREE",
            f"Write the tree of {HF_LAYOUT}, {', '.join(TREES[:-1])} or {TREES[-1]}.",
            more="hf writes safetensors, hf-flax Flax msgpack, and torchtitan a torch distributed "
            "checkpoint. Layers are stacked in easylm-scanned, and one leaf each in the "
            "unscanned trees.",
            default="hf",
            cli_type=str,
            position=3,
            record=2,
        ),
    ]
    format: Annotated[
        Literal["safetensors", "dcp", "msgpack", "stream", "orbax", "tensorstore"] | None,
        option(
            "KIND",
            "Write safetensors, dcp, msgpack, stream, orbax or tensorstore. Default: by layout.",
            more="dcp is a torch distributed checkpoint.",
            cli_type=str,
            position=4,
        ),
    ]


TENSOR_MAP = option(
    "FILE", "Read the tensors through the rows of FILE (prep docs map).", position=23, record=65
)


class ExportMapOptions(TypedDict, total=False):
    """The map from a model to the tensors of an export."""

    map: Annotated[
        PathLike | None,
        replace(
            TENSOR_MAP,
            help="Write the tensors on the right sides of the rows of FILE (prep docs map).",
        ),
    ]


class MapOptions(TypedDict, total=False):
    """The map between the tensors of a checkpoint and those of a model."""

    map: Annotated[PathLike | None, TENSOR_MAP]


class StorageOptions(TypedDict, total=False):
    """The storage of the arrays of an Orbax item."""

    storage: Annotated[
        StorageName,
        option(
            "FORM",
            "Store arrays as ocdbt or zarr3 (a few data files), or files or zarr3-files (one file per chunk).",
            more="The arrays of ocdbt and files are of zarr 2. One file per chunk is for Pathways.",
            default="ocdbt",
            position=31,
            record=17,
        ),
    ]


STRICT = flag(
    "Fail on differences that are otherwise only noted.",
    more="An example is a tensor outside of an index.",
    position=22,
)


class StrictOptions(TypedDict, total=False):
    """Whether noted differences are errors."""

    strict: Annotated[bool, STRICT]


class TowersOptions(TypedDict, total=False):
    """The parts of a model with towers, or with multi-token prediction, in an export."""

    text_only: Annotated[
        bool,
        flag(
            "Leave out the towers of a multimodal model, and multi-token prediction.",
            position=27,
            record=63,
        ),
    ]
    towers: Annotated[
        PathLike | None,
        option(
            "CHECKPOINT",
            "Read the towers or the multi-token prediction of a training step from CHECKPOINT. Default: the model that"
            " the run started from.",
            cli_type=str,
            position=28,
            record=64,
        ),
    ]


class TrainingStateOptions(TypedDict, total=False):
    """The training state in a conversion between frameworks."""

    training_state: Annotated[
        bool, flag("Convert the optimizer's moments and the step as well.", position=29, record=66)
    ]


DEFAULT_MEMORY = "512MiB"
DEFAULT_SHARD_SIZE = "5GB"

Dtype = Literal["float32", "bfloat16", "float16"]

_DTYPE = option("NAME", "Cast to float32, bfloat16 or float16.", position=16, record=50)
_ALLOW_OVERFLOW = flag(
    "Round values too large for the dtype of the output to infinity.",
    more="By default, they are an error.",
    position=16,
)


VERBATIM = option(
    None,
    "Keep the names of the file as they are, or refuse unknown architectures."
    " Default: keep the names of unknown ones.",
    flag="--verbatim/--no-verbatim",
    position=23,
    record=60,
)


class SourceOptions(TypedDict, total=False):
    """How a source is read."""

    revision: Annotated[
        str | None, option("NAME", "Read this branch, tag or commit of the hub.", position=50)
    ]
    offline: Annotated[bool, flag("Use only the hub's cache.", position=51)]
    stream: Annotated[bool, flag("Read tensors from the hub without a local copy.", position=52)]
    config: Annotated[
        PathLike | None,
        option(
            "PATH",
            "Read config.json from PATH, for a checkpoint without one.",
            position=20,
            record=41,
        ),
    ]
    step: Annotated[
        NonNegativeInt | Literal["best", "last"] | None,
        option(
            "N|best|last",
            "Read this step of a run, or the one with the lowest evaluation loss."
            " Default: the last.",
            cli_type=str,
            position=25,
        ),
    ]
    lock: Annotated[
        PathLike | None,
        option("FILE", "Refuse any byte that differs from this lock file.", position=53),
    ]
    memory: Annotated[
        int | str,
        option(
            "SIZE",
            "Limit memory to SIZE.",
            more="The limit is for anonymous memory beyond that of opening the source, at least 32 "
            "MiB. Functions that write no file ignore it.",
            default=DEFAULT_MEMORY,
            cli_type=str,
            environment="PREP_MEMORY",
            position=41,
        ),
    ]


class ModuleOptions(SourceOptions, total=False):
    """Options of `nnx_model` and `linen_model`.

    Attributes:
        dtype: Dtype of the computation. Default: "float32".
        param_dtype: Dtype of the parameters. Default: "float32".
        attention_kernel: One of the recipe's `model.attention_kernel`. Default: "blockwise".
        remat_policy: Activations that a layer saves for its backward pass, one of the recipe's `model.remat_policy`.
            default: "none".
        seed: Seed of random parameters. Default: 0.
        verify: Compare every byte with the checkpoint's checksums or digests. Default: True.
    """

    dtype: Literal["float32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    attention_kernel: Literal["reference", "blockwise", "cudnn", "pallas-splash"]
    remat_policy: str
    seed: NonNegativeInt
    verify: bool


class RerunOptions(TypedDict, total=False):
    """What happens to an output of an earlier run."""

    overwrite: Annotated[bool, flag("Replace an existing output of prep when done.", position=43)]
    restart: Annotated[bool, flag("Discard the work of an unfinished run.", position=44)]


class ConversionOptions(SourceOptions, RerunOptions, total=False):
    """How an output is written."""

    true_vocab: Annotated[
        PositiveInt | None,
        option("N", "Set the unpadded size of the source's vocabulary.", position=15, record=30),
    ]


class VerbatimOptions(TypedDict, total=False):
    """Options for verbatim checkpoints, and for side files to copy."""

    verbatim: Annotated[bool | None, VERBATIM]
    copy: Annotated[
        str | Sequence[str],
        option(
            "GLOB",
            "Copy further side files, for example '*.py' or 'FOLDER/*'. Repeatable.",
            default=(),
            position=24,
            record=61,
        ),
    ]


class DropOptions(TypedDict, total=False):
    """Which source tensors may be ignored."""

    drop: Annotated[
        str | Sequence[str],
        option(
            "PATTERN",
            "Ignore source tensors that match. Repeatable.",
            more='An example is "*.rotary_emb.inv_freq".',
            default=(),
            position=22,
            record=40,
        ),
    ]
    untie: Annotated[
        bool, flag("Keep an LM head that differs from the embedding.", position=22, record=42)
    ]


SEED_SPEC = option(
    "N",
    "Set the seed of --init normal. Default: 0.",
    more="It is below 2**64.",
    position=12,
    record=21,
)


class NewRowOptions(TypedDict, total=False):
    """Values of padding rows."""

    init: Annotated[
        Literal["zeros", "mean", "normal"],
        option(
            "KIND",
            "Fill new rows with zeros, mean or normal.",
            more="mean is that of the true rows. normal uses the config's `initializer_range`.",
            default="zeros",
            cli_type=str,
            position=12,
            record=20,
        ),
    ]
    seed: Annotated[NonNegativeInt | None, SEED_SPEC]


class PadVocabOptions(ConversionOptions, DropOptions, StrictOptions, NewRowOptions, total=False):
    """Options of `pad_vocab`. At most one of `multiple`, `size` and `mesh` sets the number of rows."""

    multiple: Annotated[
        PositiveInt | None, option("N", "Pad to a multiple of N. Default: 8.", position=1, record=1)
    ]
    size: Annotated[PositiveInt | None, option("N", "Pad to N rows.", position=1, record=2)]
    mesh: Annotated[
        str | None,
        option(
            "DP,FSDP,MP",
            "Pad to rows that this mesh divides.",
            more='Named axes are supported, such as "fsdp:64,mp:4".',
            position=1,
            record=3,
        ),
    ]


class LayoutOptions(
    ConversionOptions, VerbatimOptions, MapOptions, SourceTreeOptions, StorageOptions, total=False
):
    """Layout of an Orbax checkpoint."""

    mesh: Annotated[
        str | None,
        option(
            "DP,FSDP,MP",
            "Lay out for this device mesh.",
            more='Named axes are supported, such as "fsdp:64,mp:4". Chunks are the shards. Default: '
            "chunks of at most 4 MiB.",
            record=10,
        ),
    ]
    rules: Annotated[
        str | Sequence[str],
        option(
            "RULE",
            "Change partition rules, as DIM=AXIS. Repeatable.",
            more='A rule changes dims of parameters ("embed=none", "kv_heads=mp|none"), of '
            'activations ("act:seq=sp|none") or of single leaves ("re:PATTERN=mp,fsdp"), or is '
            'a preset ("flaxlm:1,1").',
            default=(),
            record=11,
        ),
    ]
    scan: Annotated[
        bool | None,
        option(
            None,
            "Stack the layers or not. Default: as the source, else stacked.",
            flag="--scan/--no-scan",
            record=12,
        ),
    ]
    scan_axis: Annotated[
        Literal[0, 1] | None,
        option(
            "0|1",
            "Stack the layers on this axis.",
            more="Default: as in the source, 0 for a Hugging Face folder.",
            record=13,
        ),
    ]
    compress: Annotated[
        str | None,
        option(
            "|".join(f"{codec}[:LEVEL]" for codec in WRITTEN_CODECS),
            "Compress chunks. Default: uncompressed.",
            position=30,
            record=15,
        ),
    ]


class SaveInitOptions(
    LayoutOptions, DropOptions, StrictOptions, NewRowOptions, TrainingStateOptions, total=False
):
    """Options of `save_init`."""

    pad_vocab: Annotated[
        int | str,
        option(
            "no|auto|N",
            "Pad to a multiple of N. auto: to fit --mesh.",
            default="no",
            cli_type=str,
            position=11,
            record=16,
        ),
    ]
    layers: Annotated[
        PositiveInt | None,
        option(
            "N",
            "Convert the first N layers only, to try a mesh or a program.",
            position=14,
            record=62,
        ),
    ]
    dtype: Annotated[Dtype | None, _DTYPE]
    allow_overflow: Annotated[bool, _ALLOW_OVERFLOW]
    quantized: Annotated[
        Literal["keep", "dequantize"],
        option(
            "keep|dequantize",
            "Keep quantised weights, or decode them to bfloat16 or --dtype.",
            default="keep",
            position=17,
            record=52,
        ),
    ]


class ReshardOptions(LayoutOptions, total=False):
    """Options of `reshard`."""

    params_only: Annotated[bool, flag("Drop the optimizer state.", record=14)]


class ExportOptions(
    TreeOptions,
    SourceTreeOptions,
    ConversionOptions,
    VerbatimOptions,
    TowersOptions,
    ExportMapOptions,
    StorageOptions,
    TrainingStateOptions,
    total=False,
):
    """Options of `export`."""

    keep_padding: Annotated[bool, flag("Keep the padding of the vocabulary.", position=1, record=3)]
    shard_size: Annotated[
        PositiveInt | str,
        option(
            "SIZE",
            "Limit files to SIZE.",
            default=DEFAULT_SHARD_SIZE,
            cli_type=str,
            position=2,
            record=4,
        ),
    ]
    dtype: Annotated[Dtype | None, replace(_DTYPE, position=5, record=1)]
    allow_overflow: Annotated[bool, replace(_ALLOW_OVERFLOW, position=5)]
    quantized: Annotated[
        Literal["keep", "dequantize"],
        option(
            "keep|dequantize",
            "Copy the quantised bytes of decoded weights, or write the values.",
            more="The bytes are those of the model that save-init decoded, if it is found unchanged.",
            default="keep",
            position=17,
            record=53,
        ),
    ]
    quantized_source: Annotated[
        PathLike | None,
        option(
            "SOURCE",
            "Copy the quantised bytes from SOURCE.",
            more="Default: the model that the manifest names.",
            position=18,
            record=54,
        ),
    ]
    ema: Annotated[
        bool, flag("Take the moving average of a run's parameters.", position=26, record=45)
    ]
    exclude: Annotated[
        str | Sequence[str],
        option(
            "GLOB",
            "Leave out side files, for example README.md or 'images/*'. Repeatable.",
            default=(),
            position=24,
            record=67,
        ),
    ]
    push: Annotated[str | None, option("OWNER/NAME", "Upload the export to the hub.", position=21)]
    private: Annotated[bool, flag("Make a new repository of --push private.", position=21)]


class MergeOptions(SourceOptions, RerunOptions, StrictOptions, total=False):
    """Options of `merge`. The options of `SourceOptions` are for the base."""

    allow_overflow: Annotated[
        bool,
        replace(
            _ALLOW_OVERFLOW,
        ),
    ]
    verify: Annotated[
        bool,
        option(
            None,
            "Skip comparing BASE with the base that the adapter was trained with.",
            default=True,
            flag="--no-verify",
            position=17,
        ),
    ]


DRY_RUN = flag("Show the plan. Write nothing.", position=42)


class ConversionArguments(TypedDict, total=False):
    """Arguments of the converting functions with an option on the command line, such as `--out`."""

    out: Annotated[
        PathLike | None,
        option("FOLDER", "Write to FOLDER. Default: NAME and a suffix.", position=40),
    ]
    dry_run: Annotated[bool, DRY_RUN]


class AddTokensOptions(ConversionOptions, DropOptions, StrictOptions, total=False):
    """Options of `add_tokens`. `tokens` is required."""

    tokens: Annotated[
        PathLike,
        option(
            "FILE",
            "Add these tokens: one per line, or a JSON list in *.json.",
            default=REQUIRED,
            position=1,
            record=1,
        ),
    ]
    init: Annotated[
        Literal["mean", "zeros", "normal"],
        option(
            "KIND",
            "Fill new rows with the mean of the token's pieces, zeros or normal.",
            more="normal uses the config's `initializer_range`.",
            default="mean",
            cli_type=str,
            position=12,
            record=20,
        ),
    ]
    seed: Annotated[NonNegativeInt | None, SEED_SPEC]


class RemoveTokensOptions(SourceOptions, RerunOptions, DropOptions, StrictOptions, total=False):
    """Options of `remove_tokens`."""
