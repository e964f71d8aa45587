"""Keyword options of the public conversion functions, each with the meaning of the command-line option of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from prepcli.api.arguments import NonNegativeInt, PositiveInt
from prepcli.commands.conversion import CommonOptions
from prepcli.commands.export import parse_shard_size
from prepcli.engine.budget import check_memory, parse_memory
from prepcli.planning.accounting import MatchOptions

PathLike = str | Path
Dtype = Literal["float32", "bfloat16", "float16"]
DEFAULT_MEMORY = "512MiB"


class SourceOptions(TypedDict, total=False):
    """How a source is read.

    `revision`: branch, tag or commit on the hub. `offline`: use only the hub's cache. `stream`: read tensors from
    the hub without a local copy. `config`: config.json, or its folder, of a source without one. `step`: step of a
    training run. `memory`: memory limit, in bytes or as text such as "512MiB".
    """

    revision: str | None
    offline: bool
    stream: bool
    config: PathLike | None
    step: NonNegativeInt | None
    memory: int | str


class ConversionOptions(SourceOptions, total=False):
    """How an output is written.

    `overwrite`: replace another output of prep. `restart`: discard the work of an interrupted run. `true_vocab`: number
    of tokens of a vocabulary that was published with padding.
    """

    overwrite: bool
    restart: bool
    true_vocab: PositiveInt | None


class DropOptions(TypedDict, total=False):
    """Which source tensors may be ignored.

    `drop`: patterns of names to ignore. `untie`: keep a head that differs from the embedding it should equal.
    """

    drop: str | Sequence[str]
    untie: bool


class NewRowOptions(TypedDict, total=False):
    """Values of padding rows. `init`: "zeros", "mean" or "normal". `seed`: seed of "normal"."""

    init: Literal["zeros", "mean", "normal"]
    seed: NonNegativeInt | None


class PadVocabOptions(ConversionOptions, DropOptions, NewRowOptions, total=False):
    """Options of `pad_vocab`. At most one of `multiple` (default 8), `size` and `mesh` sets the number of rows."""

    multiple: PositiveInt | None
    size: PositiveInt | None
    mesh: str | None


class LayoutOptions(ConversionOptions, total=False):
    """Layout of an Orbax checkpoint.

    `mesh`: "dp,fsdp,mp" or named axes such as "fsdp:64,mp:4". `rules`: changes of partition rules such as "embed=none".
    `scan`: stack layers in one leaf. `scan_axis`: axis of the stack. `compress`: "zstd" or "zstd:LEVEL".
    """

    mesh: str | None
    rules: str | Sequence[str]
    scan: bool | None
    scan_axis: Literal[0, 1] | None
    compress: str | None


class SaveInitOptions(LayoutOptions, DropOptions, NewRowOptions, total=False):
    """Options of `save_init`.

    `pad_vocab`: "no", "auto" (to the size that the mesh divides) or a multiple as text. `dtype`: "float32", "bfloat16"
    or "float16". `allow_overflow`: write infinity for values too large for `dtype`.
    """

    pad_vocab: str
    dtype: Dtype | None
    allow_overflow: bool


class ReshardOptions(LayoutOptions, total=False):
    """Options of `reshard`. `params_only`: leave out the optimizer state of a training checkpoint."""

    params_only: bool


class ExportOptions(ConversionOptions, total=False):
    """Options of `export`.

    `layout`: "hf", "hf-flax" or "easylm". `keep_padding`: keep the padding rows. `shard_size`: largest file, in
    bytes or as text. `dtype` and `allow_overflow`: as in `SaveInitOptions`.
    """

    layout: Literal["hf", "hf-flax", "easylm"]
    keep_padding: bool
    shard_size: PositiveInt | str
    dtype: Dtype | None
    allow_overflow: bool


# The keyword options of the function of each command.
OPTIONS_BY_COMMAND = {
    "pad-vocab": PadVocabOptions,
    "save-init": SaveInitOptions,
    "reshard": ReshardOptions,
    "export": ExportOptions,
}


def as_tuple(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Return a sequence of texts as a tuple; one text stands for itself."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def to_memory_nbytes(memory: int | str) -> int:
    """Return a memory limit in bytes; raise a UsageError if it is too small for the engine."""
    if isinstance(memory, str):
        return parse_memory(memory)
    check_memory(memory, str(memory))
    return memory


def to_shard_nbytes(size: int | str) -> int:
    """Return the size of a file in bytes; raise a UsageError for text that is not a size."""
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
    )


def match_options(options: Mapping[str, Any]) -> MatchOptions:
    """Return which source tensors may be ignored."""
    return MatchOptions(as_tuple(options.get("drop", ())), options.get("untie", False))


def select(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of these names that are present."""
    return {name: options[name] for name in names if name in options}
