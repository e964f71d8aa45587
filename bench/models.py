"""Write checkpoints of published size with random values: `python -m bench.models gpt-neo-1.3B OUT`.

The model is an alias or any config.json of a supported family. Names and shapes come from the tables of the families,
configs from the published models. Memory use is a few blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.published import PUBLISHED, override_config
from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes
from prepcli.formats.safetensors import (
    INDEX_FILE,
    LayoutEntry,
    SafetensorsLayout,
    encode_index,
    lay_out_files,
    split_into_shards,
)
from prepcli.models.parameters import LAYER_ATOMS, HFConfig, parameter_rows, read_size
from prepcli.models.registry import family_of
from prepcli.planning.tensors import itemsize
from prepcli.targets.hf_folder import json_bytes

BLOCK_NBYTES = 8 << 20
SHARD_NBYTES = 5 * 10**9
SEED = 0
STD = 0.02
NO_LENGTH_LIMIT = 10**30  # transformers writes this number for a missing limit
# Sign and mantissa bits of a value.
FREE_BITS = {
    "float32": 0x807FFFFF,
    "float16": 0x83FF,
    "bfloat16": 0x807F,
}
KEY_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication modulo 2^n is injective


@dataclass(frozen=True, slots=True)
class RandomBlock:
    """A block of random normals as 64-bit words. XOR with a key changes the values and keeps them finite."""

    words: npt.NDArray[np.uint64]
    free_bits: tuple[int, ...]  # bits of a word that keys may flip

    def key(self, number: int) -> np.uint64:
        """Return the key of block `number`. Keys of different numbers below 2^32 differ in every dtype."""
        mixed_number = number * KEY_MULTIPLIER % (1 << len(self.free_bits))
        return np.uint64(
            sum((mixed_number >> index & 1) << bit for index, bit in enumerate(self.free_bits))
        )


def tensor_entries(config: HFConfig) -> list[LayoutEntry]:
    """Return the tensors of a model's file, layer by layer. Raise PrepError for an invalid config."""
    family = family_of(config)
    dtype = str(config["torch_dtype"])
    tied = family.tying.head_leaf if family.is_tied(config) else None
    bound_rows = {
        path: bind_row(row, family.sizes(config))
        for path, row in parameter_rows(family, config).items()
        if path != tied
    }
    tensors = {  # several rows may share a tensor
        name: (_file_order(path, stack_index), row.source_shape)
        for path, row in bound_rows.items()
        for name, stack_index in row.tensors()
    }
    return [
        (
            name if name in family.unprefixed else family.prefix + name,
            dtype,
            shape,
            math.prod(shape) * itemsize(dtype),
        )
        for name, (_, shape) in sorted(tensors.items(), key=lambda item: item[1][0])
    ]


def _file_order(path: str, stack_index: Mapping[str, int]) -> tuple[float, int]:
    """Return the sort key of a leaf's tensor in a file: embedding, encoder layers, decoder layers, the rest."""
    if path.startswith("embed."):
        return -1, 0
    return next(
        (
            (-LAYER_ATOMS.index(stack), stack_index[stack])
            for stack in LAYER_ATOMS
            if stack in stack_index
        ),
        (1, 0),
    )


def write_model(
    folder: Path, config: HFConfig, shard_nbytes: int = SHARD_NBYTES, sparse: bool = False
) -> int:
    """Write a model into a new folder. Equal arguments give equal bytes.

    Args:
        folder: Folder to create.
        config: Config of the model.
        shard_nbytes: Size limit of a weight file.
        sparse: Whether to write real headers over sparse zeros, without a tokenizer.

    Returns:
        Size of the weights in bytes.
    """
    model_entries = tensor_entries(config)
    folder.mkdir(parents=True)
    groups = split_into_shards(model_entries, shard_nbytes)
    # The tensors of a file are sorted, as in files of the safetensors library.
    layouts = lay_out_files([(name, sorted(group), None) for name, group in groups])
    values, numbers = (
        None if sparse else _make_random_block(str(config["torch_dtype"])),
        itertools.count(),
    )
    for layout in layouts:
        _write_file(folder / layout.name, layout, values, numbers)
    if len(layouts) > 1:
        (folder / INDEX_FILE).write_bytes(encode_index(layouts))
    for name, content in ({"config.json": config} if sparse else _make_small_files(config)).items():
        (folder / name).write_bytes(json_bytes(content))
    return sum(nbytes for *_, nbytes in model_entries)


def _make_random_block(dtype: str) -> RandomBlock:
    width = 8 * itemsize(dtype)
    free = tuple(
        low + bit
        for low in range(0, 64, width)
        for bit in range(width)
        if FREE_BITS[dtype] >> bit & 1
    )
    normals = np.random.default_rng(SEED).standard_normal(
        BLOCK_NBYTES // itemsize(dtype), np.float32
    ) * np.float32(STD)
    if dtype == "bfloat16":
        return RandomBlock((normals.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64), free)
    return RandomBlock(normals.astype(dtype, copy=False).view(np.uint64), free)


def _write_file(
    path: Path, layout: SafetensorsLayout, values: RandomBlock | None, numbers: Iterator[int]
) -> None:
    with path.open("wb") as file:
        file.write(layout.header)
        if values is None:
            file.truncate(layout.size)
            return
        changed = np.empty_like(values.words)
        for tensor in layout.tensors:
            for start in range(0, tensor.nbytes, BLOCK_NBYTES):
                nbytes = min(BLOCK_NBYTES, tensor.nbytes - start)
                words = -(-nbytes // 8)
                np.bitwise_xor(values.words[:words], values.key(next(numbers)), out=changed[:words])
                file.write(changed.view(np.uint8)[:nbytes].data)


def _make_small_files(config: HFConfig) -> dict[str, object]:
    tokens = {f"token{number}": number for number in range(read_size(config, "vocab_size", 0))}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "token0"},
    }
    return {
        "config.json": config,
        "generation_config.json": {
            key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": family_of(config).arch_config(config).max_positions
            or NO_LENGTH_LIMIT,
        },
    }


def _parse_config(text: str) -> HFConfig:
    if text in PUBLISHED:
        return PUBLISHED[text]
    try:
        return {"torch_dtype": "float32", **json.loads(Path(text).read_text())}
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"`{text}` is neither an alias nor a config.json"
        ) from error


def _parse_field(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}` is not KEY=JSON") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the requested model and print its size."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.models", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "config",
        type=_parse_config,
        metavar="NAME",
        help="alias (see `prep models`), or a config.json",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument(
        "--dtype", choices=FREE_BITS, help="dtype of all weights; default: as published"
    )
    parser.add_argument("--layers", type=int, help="number of layers; widths stay as published")
    parser.add_argument("--shard-gb", type=float, default=5, help="decimal GB per file; default: 5")
    parser.add_argument(
        "--sparse", action="store_true", help="write real headers over sparse zeros"
    )
    parser.add_argument(
        "--set",
        type=_parse_field,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="override a config field",
    )
    options = parser.parse_args(arguments)
    try:
        config = override_config(options.config, options.dtype, options.layers, dict(options.set))
        nbytes = write_model(options.out, config, int(options.shard_gb * 10**9), options.sparse)
    except (PrepError, FileExistsError) as error:
        parser.error(str(error))
    print(f"{options.out}: {format_bytes(nbytes)} in {len(tensor_entries(config))} tensors")


if __name__ == "__main__":
    main()
