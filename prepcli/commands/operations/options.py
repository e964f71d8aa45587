"""The options of the operations, each defined once.

The field of an option has its type, its default and its texts. From them come the keyword of the Python function, the
option of the command line, the command line that a manifest records, and the reference pages.

To add an option, add a field here and read `options["NAME"]` in the operation:

    class SaveInitOptions(...):
        layers: Annotated[PositiveInt | None, OptionSpec("N", "Convert the first N layers.", "Number of layers …")]

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypedDict

from prepcli.commands.operations.map_options import ExportMapOptions, MapOptions
from prepcli.commands.operations.storage_options import StorageOptions
from prepcli.commands.operations.strict_options import StrictOptions
from prepcli.commands.operations.towers_options import TowersOptions
from prepcli.commands.operations.training_state_options import TrainingStateOptions
from prepcli.commands.operations.tree_options import SourceTreeOptions, TreeOptions
from prepcli.core.option_spec import NOT_RECORDED, NonNegativeInt, OptionSpec, PathLike, PositiveInt

DEFAULT_MEMORY = "512MiB"
DEFAULT_SHARD_SIZE = "5GB"

Dtype = Literal["float32", "bfloat16", "float16"]

_DTYPE = OptionSpec(
    "NAME",
    "Cast to float32, bfloat16 or float16.",
    "Dtype to cast to. Default: as in the source.",
    position=16,
    record=50,
)
_ALLOW_OVERFLOW = OptionSpec(
    None,
    "Round values too large for the dtype of the output to infinity.",
    "Write infinity for values too large for `dtype`. Default: False, which raises.",
    default=False,
    position=16,
    record=NOT_RECORDED,
)


VERBATIM = OptionSpec(
    None,
    "Keep the names of the file as they are, or refuse unknown architectures."
    " Default: keep the names of unknown ones.",
    "True keeps the tensors under the names of the file, for conversions only. False refuses unknown"
    " architectures. Default: keep the names of unknown ones.",
    flag="--verbatim/--no-verbatim",
    position=23,
    record=60,
)


class SourceOptions(TypedDict, total=False):
    """How a source is read."""

    revision: Annotated[
        str | None,
        OptionSpec(
            "NAME",
            "Read this branch, tag or commit of the hub.",
            "Branch, tag or commit on the hub. Default: the main branch.",
            position=50,
            record=NOT_RECORDED,
        ),
    ]
    offline: Annotated[
        bool,
        OptionSpec(
            None,
            "Use only the hub's cache.",
            "Use only the hub's cache. Default: False.",
            default=False,
            position=51,
            record=NOT_RECORDED,
        ),
    ]
    stream: Annotated[
        bool,
        OptionSpec(
            None,
            "Read tensors from the hub without a local copy.",
            "Read tensors from the hub without a local copy. Default: False.",
            default=False,
            position=52,
            record=NOT_RECORDED,
        ),
    ]
    config: Annotated[
        PathLike | None,
        OptionSpec(
            "PATH",
            "Read config.json from PATH, for a checkpoint without one.",
            "config.json, or its folder, of a source without one.",
            position=20,
            record=41,
        ),
    ]
    step: Annotated[
        NonNegativeInt | Literal["best", "last"] | None,
        OptionSpec(
            "N|best|last",
            "Read this step of a run, or the one with the lowest evaluation loss."
            " Default: the last.",
            'Step of a training run. "best" has the lowest evaluation loss. Default: the last.',
            cli_type=str,
            position=25,
            record=NOT_RECORDED,
        ),
    ]
    lock: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Refuse any byte that differs from this lock file.",
            "Lock file: any byte that differs from it is an error. Default: none.",
            position=53,
            record=NOT_RECORDED,
        ),
    ]
    memory: Annotated[
        int | str,
        OptionSpec(
            "SIZE",
            "Limit memory to SIZE.",
            "Limit of anonymous memory beyond that of opening the source, in bytes or as text such"
            ' as "1GiB". At least 32 MiB. Default: "512MiB". Functions that write no file ignore it.',
            default=DEFAULT_MEMORY,
            cli_type=str,
            environment="PREP_MEMORY",
            position=41,
            record=NOT_RECORDED,
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

    overwrite: Annotated[
        bool,
        OptionSpec(
            None,
            "Replace an existing output of prep when done.",
            "Replace another output of prep. Default: False.",
            default=False,
            position=43,
            record=NOT_RECORDED,
        ),
    ]
    restart: Annotated[
        bool,
        OptionSpec(
            None,
            "Discard the work of an unfinished run.",
            "Discard the work of an interrupted run. Default: False.",
            default=False,
            position=44,
            record=NOT_RECORDED,
        ),
    ]


class ConversionOptions(SourceOptions, RerunOptions, total=False):
    """How an output is written."""

    true_vocab: Annotated[
        PositiveInt | None,
        OptionSpec(
            "N",
            "Set the unpadded size of the source's vocabulary.",
            "Number of tokens of a vocabulary that was published with padding.",
            position=15,
            record=30,
        ),
    ]


class VerbatimOptions(TypedDict, total=False):
    """Options for verbatim checkpoints, and for side files to copy."""

    verbatim: Annotated[bool | None, VERBATIM]
    copy: Annotated[
        str | Sequence[str],
        OptionSpec(
            "GLOB",
            "Copy further side files, for example '*.py' or 'FOLDER/*'. Repeatable.",
            'One or more patterns of further side files to copy, such as "*.py" or "FOLDER/*".',
            default=(),
            position=24,
            record=61,
        ),
    ]


class DropOptions(TypedDict, total=False):
    """Which source tensors may be ignored."""

    drop: Annotated[
        str | Sequence[str],
        OptionSpec(
            "PATTERN",
            "Ignore source tensors that match. Repeatable.",
            'One or more patterns of names to ignore, such as "*.rotary_emb.inv_freq".',
            default=(),
            position=22,
            record=40,
        ),
    ]
    untie: Annotated[
        bool,
        OptionSpec(
            None,
            "Keep an LM head that differs from the embedding.",
            "Keep a head that differs from the embedding it should equal. Default: False.",
            default=False,
            position=22,
            record=42,
        ),
    ]


SEED_SPEC = OptionSpec(
    "N",
    "Set the seed of --init normal. Default: 0.",
    'Seed of "normal", below 2**64. Default: 0.',
    position=12,
    record=21,
)


class NewRowOptions(TypedDict, total=False):
    """Values of padding rows."""

    init: Annotated[
        Literal["zeros", "mean", "normal"],
        OptionSpec(
            "KIND",
            "Fill new rows with zeros, mean or normal.",
            '"zeros" (the default), "mean" of the true rows, or "normal" with the config\'s'
            " `initializer_range`.",
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
        PositiveInt | None,
        OptionSpec(
            "N",
            "Pad to a multiple of N. Default: 8.",
            "Pad to a multiple of this number of rows. Default: 8.",
            position=1,
            record=1,
        ),
    ]
    size: Annotated[
        PositiveInt | None,
        OptionSpec("N", "Pad to N rows.", "Pad to this number of rows.", position=1, record=2),
    ]
    mesh: Annotated[
        str | None,
        OptionSpec(
            "DP,FSDP,MP",
            "Pad to rows that this mesh divides.",
            'Pad to a number of rows that this mesh divides, such as "1,64,4" (dp,fsdp,mp) or'
            ' "fsdp:64,mp:4".',
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
        OptionSpec(
            "DP,FSDP,MP",
            "Lay out for this device mesh.",
            '"dp,fsdp,mp" sizes such as "1,64,4", or named axes such as "fsdp:64,mp:4". Chunks are'
            " its shards. Default: chunks of at most 4 MiB.",
            record=10,
        ),
    ]
    rules: Annotated[
        str | Sequence[str],
        OptionSpec(
            "RULE",
            "Change partition rules, as DIM=AXIS. Repeatable.",
            'One or more changes of partition rules: of dims of parameters ("embed=none",'
            ' "kv_heads=mp|none"), of activations ("act:seq=sp|none") or of single leaves'
            ' ("re:PATTERN=mp,fsdp"), or a preset ("flaxlm:1,1").',
            default=(),
            flag="--rule",
            record=11,
        ),
    ]
    scan: Annotated[
        bool | None,
        OptionSpec(
            None,
            "Stack the layers or not. Default: as the source, else stacked.",
            "Stack all layers in one leaf. Default: as in the source, True for a Hugging Face"
            " folder.",
            flag="--scan/--no-scan",
            record=12,
        ),
    ]
    scan_axis: Annotated[
        Literal[0, 1] | None,
        OptionSpec(
            "0|1",
            "Stack the layers on this axis.",
            "Axis of the stack. Default: as in the source, 0 for a Hugging Face folder.",
            record=13,
        ),
    ]
    compress: Annotated[
        str | None,
        OptionSpec(
            "zstd[:LEVEL]",
            "Compress chunks. Default: uncompressed.",
            '"zstd" or "zstd:LEVEL". Default: uncompressed.',
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
        OptionSpec(
            "no|auto|N",
            "Pad to a multiple of N. auto: to fit --mesh.",
            '"no" (the default), "auto" (to the size that the mesh divides) or a multiple,'
            " such as 8.",
            default="no",
            cli_type=str,
            position=11,
            record=16,
        ),
    ]
    layers: Annotated[
        PositiveInt | None,
        OptionSpec(
            "N",
            "Convert the first N layers only, to try a mesh or a program.",
            "Number of layers to convert, to try a mesh or a program. Default: all.",
            position=14,
            record=62,
        ),
    ]
    dtype: Annotated[Dtype | None, _DTYPE]
    allow_overflow: Annotated[bool, _ALLOW_OVERFLOW]
    quantized: Annotated[
        Literal["keep", "dequantize"],
        OptionSpec(
            "keep|dequantize",
            "Keep quantised weights, or decode them to bfloat16 or --dtype.",
            '"keep" (the default) or "dequantize", which decodes quantised weights to bfloat16 or `dtype`.',
            default="keep",
            position=17,
            record=52,
        ),
    ]


class ReshardOptions(LayoutOptions, total=False):
    """Options of `reshard`."""

    params_only: Annotated[
        bool,
        OptionSpec(
            None,
            "Drop the optimizer state.",
            "Leave out the optimizer state of a training checkpoint. Default: False.",
            default=False,
            record=14,
        ),
    ]


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

    keep_padding: Annotated[
        bool,
        OptionSpec(
            None,
            "Keep the padding of the vocabulary.",
            "Keep the padding rows of the vocabulary. Default: False.",
            default=False,
            position=1,
            record=3,
        ),
    ]
    shard_size: Annotated[
        PositiveInt | str,
        OptionSpec(
            "SIZE",
            "Limit files to SIZE.",
            'Largest file, in bytes or as text such as "5GB" (the default).',
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
        OptionSpec(
            "keep|dequantize",
            "Copy the quantised bytes of decoded weights, or write the values.",
            '"keep" (the default) copies the quantised bytes of weights that save-init decoded from their model,'
            ' if it is found unchanged. "dequantize" writes their values.',
            default="keep",
            position=17,
            record=53,
        ),
    ]
    quantized_source: Annotated[
        PathLike | None,
        OptionSpec(
            "SOURCE",
            "Copy the quantised bytes from SOURCE.",
            "Quantised model that the checkpoint was decoded from. Default: the model that the manifest names.",
            position=18,
            record=54,
        ),
    ]
    ema: Annotated[
        bool,
        OptionSpec(
            None,
            "Take the moving average of a run's parameters.",
            "Take the moving average of a run's parameters. Default: False.",
            default=False,
            position=26,
            record=45,
        ),
    ]
    push: Annotated[
        str | None,
        OptionSpec(
            "OWNER/NAME",
            "Upload the export to the hub.",
            'Repository of the hub, such as "me/llama-13b", to which the export is uploaded.',
            position=21,
            record=NOT_RECORDED,
        ),
    ]
    private: Annotated[
        bool,
        OptionSpec(
            None,
            "Make a new repository of --push private.",
            "Make a new repository of `push` private. Default: False.",
            default=False,
            position=21,
            record=NOT_RECORDED,
        ),
    ]


class MergeOptions(SourceOptions, RerunOptions, StrictOptions, total=False):
    """Options of `merge`. The options of `SourceOptions` are for the base."""

    allow_overflow: Annotated[
        bool,
        replace(
            _ALLOW_OVERFLOW,
            doc="Write infinity for sums too large for the base's dtype. Default: False, which"
            " raises.",
        ),
    ]
    verify: Annotated[
        bool,
        OptionSpec(
            None,
            "Skip comparing BASE with the base that the adapter was trained with.",
            "Compare the base with the one that the adapter was trained with. Default: True.",
            default=True,
            flag="--no-verify",
            position=17,
            record=NOT_RECORDED,
        ),
    ]


class ConversionArguments(TypedDict, total=False):
    """Arguments of the converting functions with an option on the command line, such as `--out`."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FOLDER", "Write to FOLDER. Default: NAME and a suffix.", "Output folder.", position=40
        ),
    ]
    dry_run: Annotated[
        bool,
        OptionSpec(
            None,
            "Show the plan. Write nothing.",
            "Return the plan from headers only.",
            default=False,
            position=42,
        ),
    ]
