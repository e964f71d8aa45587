"""Keyword options of the public functions, each with the meaning of the command-line option of its name.

All keys are optional. An unknown key or a value of another type raises a UsageError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from prepcli.api.arguments import NonNegativeInt, PositiveInt
from prepcli.commands.conversion import CommonOptions
from prepcli.commands.export import parse_shard_size
from prepcli.engine.budget import DEFAULT_MEMORY, check_memory, parse_memory
from prepcli.planning.accounting import MatchOptions

PathLike = str | Path
Dtype = Literal["float32", "bfloat16", "float16"]


class SourceOptions(TypedDict, total=False):
    """How a source is read.

    Attributes:
        revision: Branch, tag or commit on the hub; default: the main branch.
        offline: Use only the hub's cache; default: False.
        stream: Read tensors from the hub without a local copy; default: False.
        config: config.json, or its folder, of a source without one.
        step: Step of a training run; "best" has the lowest evaluation loss; default: the last.
        memory: Limit of anonymous memory beyond that of opening the source, in bytes or as text such as "1GiB"; at
            least 32 MiB, default "512MiB". Functions that write no file ignore it.
    """

    revision: str | None
    offline: bool
    stream: bool
    config: PathLike | None
    step: NonNegativeInt | Literal["best", "last"] | None
    memory: int | str


class ModuleOptions(SourceOptions, total=False):
    """Options of `nnx_model` and `linen_model`.

    Attributes:
        dtype: Dtype of the computation; default: "float32".
        param_dtype: Dtype of the parameters; default: "float32".
        attention_kernel: One of the recipe's `model.attention_kernel`; default: "blockwise".
        remat_policy: Activations that a layer saves for its backward pass, one of the recipe's `model.remat_policy`;
            default: "none".
        seed: Seed of random parameters; default: 0.
        verify: Compare every byte with the checkpoint's checksums or digests; default: True.
    """

    dtype: Literal["float32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    attention_kernel: Literal["reference", "blockwise", "cudnn", "pallas-splash"]
    remat_policy: str
    seed: NonNegativeInt
    verify: bool


class ConversionOptions(SourceOptions, total=False):
    """How an output is written.

    Attributes:
        overwrite: Replace another output of prep; default: False.
        restart: Discard the work of an interrupted run; default: False.
        true_vocab: Number of tokens of a vocabulary that was published with padding.
    """

    overwrite: bool
    restart: bool
    true_vocab: PositiveInt | None


class DropOptions(TypedDict, total=False):
    """Which source tensors may be ignored.

    Attributes:
        drop: One or more patterns of names to ignore, such as "*.rotary_emb.inv_freq".
        untie: Keep a head that differs from the embedding it should equal; default: False.
    """

    drop: str | Sequence[str]
    untie: bool


class NewRowOptions(TypedDict, total=False):
    """Values of padding rows.

    Attributes:
        init: "zeros" (the default), "mean" of the true rows, or "normal" with the config's `initializer_range`.
        seed: Seed of "normal", below 2**64; default: 0.
    """

    init: Literal["zeros", "mean", "normal"]
    seed: NonNegativeInt | None


class PadVocabOptions(ConversionOptions, DropOptions, NewRowOptions, total=False):
    """Options of `pad_vocab`. At most one of `multiple`, `size` and `mesh` sets the number of rows.

    Attributes:
        multiple: Pad to a multiple of this number of rows; default: 8.
        size: Pad to this number of rows.
        mesh: Pad to a number of rows that this mesh divides, such as "1,64,4" (dp,fsdp,mp) or "fsdp:64,mp:4".
    """

    multiple: PositiveInt | None
    size: PositiveInt | None
    mesh: str | None


class LayoutOptions(ConversionOptions, total=False):
    """Layout of an Orbax checkpoint.

    Attributes:
        mesh: "dp,fsdp,mp" sizes such as "1,64,4", or named axes such as "fsdp:64,mp:4". Chunks are its shards; default:
            chunks of at most 4 MiB.
        rules: One or more changes of partition rules: of dims of parameters ("embed=none", "kv_heads=mp|none"), of
            activations ("act:seq=sp|none") or of single leaves ("re:PATTERN=mp,fsdp"), or a preset ("flaxlm:1,1").
        scan: Stack all layers in one leaf; default: as in the source, True for a Hugging Face folder.
        scan_axis: Axis of the stack; default: as in the source, 0 for a Hugging Face folder.
        compress: "zstd" or "zstd:LEVEL"; default: uncompressed.
    """

    mesh: str | None
    rules: str | Sequence[str]
    scan: bool | None
    scan_axis: Literal[0, 1] | None
    compress: str | None


class SaveInitOptions(LayoutOptions, DropOptions, NewRowOptions, total=False):
    """Options of `save_init`.

    Attributes:
        pad_vocab: "no" (the default), "auto" (to the size that the mesh divides) or a multiple as text, such as "8".
        dtype: Dtype to cast to; default: as in the source.
        allow_overflow: Write infinity for values too large for `dtype`; default: False, which raises.
    """

    pad_vocab: str
    dtype: Dtype | None
    allow_overflow: bool


class ReshardOptions(LayoutOptions, total=False):
    """Options of `reshard`.

    Attributes:
        params_only: Leave out the optimizer state of a training checkpoint; default: False.
    """

    params_only: bool


class ExportOptions(ConversionOptions, total=False):
    """Options of `export`.

    Attributes:
        layout: "hf" (safetensors, the default), "hf-flax" (Flax msgpack) or "easylm" (stream).
        keep_padding: Keep the padding rows of the vocabulary; default: False.
        shard_size: Largest file, in bytes or as text such as "5GB" (the default).
        dtype: Dtype to cast to; default: as in the source.
        allow_overflow: Write infinity for values too large for `dtype`; default: False, which raises.
        ema: Take the moving average of a run's parameters; default: False.
    """

    layout: Literal["hf", "hf-flax", "easylm"]
    keep_padding: bool
    shard_size: PositiveInt | str
    dtype: Dtype | None
    allow_overflow: bool
    ema: bool


class MergeOptions(SourceOptions, total=False):
    """Options of `merge`. The options of `SourceOptions` are for the base.

    Attributes:
        overwrite: Replace another output of prep; default: False.
        restart: Discard the work of an interrupted run; default: False.
        allow_overflow: Write infinity for sums too large for the base's dtype; default: False, which raises.
        verify: Compare the base with the one that the adapter was trained with; default: True.
    """

    overwrite: bool
    restart: bool
    allow_overflow: bool
    verify: bool


# The keyword options of the function of each command.
OPTIONS_BY_COMMAND = {
    "pad-vocab": PadVocabOptions,
    "save-init": SaveInitOptions,
    "reshard": ReshardOptions,
    "export": ExportOptions,
    "merge": MergeOptions,
}


def as_tuple(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Return a sequence of texts as a tuple; one text stands for itself."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def to_memory_nbytes(memory: int | str) -> int:
    """Return a memory limit in bytes; raise UsageError if it is too small for the engine."""
    if isinstance(memory, str):
        return parse_memory(memory)
    check_memory(memory, str(memory))
    return memory


def to_shard_nbytes(size: int | str) -> int:
    """Return the size of a file in bytes; raise UsageError for text that is not a size."""
    return parse_shard_size(size) if isinstance(size, str) else size


def common_options(checkpoint: PathLike, out: PathLike | None, options: Mapping[str, Any]) -> CommonOptions:
    """Return the options that all commands share, as commands take them."""
    config = options.get("config")
    return CommonOptions(
        str(checkpoint),
        Path(out) if out is not None else None,
        to_memory_nbytes(options.get("memory", DEFAULT_MEMORY)),
        overwrite=options.get("overwrite", False),
        restart=options.get("restart", False),
        offline=options.get("offline", False),
        revision=options.get("revision"),
        step=options.get("step"),
        stream=options.get("stream", False),
        config=Path(config) if config is not None else None,
        allow_overflow=options.get("allow_overflow", False),
        ema=options.get("ema", False),
    )


def match_options(options: Mapping[str, Any]) -> MatchOptions:
    """Return which source tensors may be ignored."""
    return MatchOptions(as_tuple(options.get("drop", ())), options.get("untie", False))


def select(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of these names that are present."""
    return {name: options[name] for name in names if name in options}
