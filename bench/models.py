"""Checkpoints of real size with made-up values: `python -m bench.models gpt-neo-1.3B OUT [--dtype bfloat16] …`, or of
any config.json of a family that prep knows.

Names and shapes are the families' own tables, configs those of the published models. Memory stays at a few blocks.
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
from prepcli.console.formatting import format_bytes
from prepcli.errors import PrepError
from prepcli.formats.safetensors import INDEX_FILE
from prepcli.formats.safetensors_layout import (
    LayoutEntry,
    SafetensorsLayout,
    encode_index,
    lay_out_files,
    split_into_shards,
)
from prepcli.planning.tensors import itemsize
from prepcli.targets.hf_folder import json_bytes
from trainer.models.axis_map import bind_row
from trainer.models.parameters import LAYER_ATOMS, HFConfig, parameter_rows
from trainer.models.registry import family_of

BLOCK_NBYTES = 8 << 20
SHARD_NBYTES = 5 * 10**9
SEED = 0
STD = 0.02
NO_LENGTH_LIMIT = 10**30  # as transformers writes it where there is no end
FREE_BITS = {"float32": 0x807FFFFF, "float16": 0x83FF, "bfloat16": 0x807F}  # sign and mantissa of a value
KEY_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses no number


@dataclass(frozen=True, slots=True)
class RandomBlock:
    """One block of random normals as 64-bit words; XORed with a key its values stay finite and become others."""

    words: npt.NDArray[np.uint64]
    free_bits: tuple[int, ...]  # bits of a word that keys may change

    def key(self, number: int) -> np.uint64:
        """The key of a block; different numbers have different ones, up to 2^32 of them in any dtype."""
        mixed = number * KEY_MULTIPLIER % (1 << len(self.free_bits))
        return np.uint64(sum((mixed >> i & 1) << bit for i, bit in enumerate(self.free_bits)))


def tensor_entries(config: HFConfig) -> list[LayoutEntry]:
    """The tensors that a file of this model holds, layer by layer. Raises PrepError for a config without sense."""
    family = family_of(config)
    dtype = config["torch_dtype"]
    tied = family.tying.head_leaf if family.is_tied(config) else None
    bound = {
        path: bind_row(row, family.sizes(config))
        for path, row in parameter_rows(family, config).items()
        if path != tied
    }
    named = {  # several rows may share a tensor
        name: (_place(path, at), row.source_shape) for path, row in bound.items() for name, at in row.tensors()
    }
    return [
        (name if name in family.unprefixed else family.prefix + name, dtype, shape, math.prod(shape) * itemsize(dtype))
        for name, (_, shape) in sorted(named.items(), key=lambda found: found[1][0])
    ]


def _place(path: str, at: Mapping[str, int]) -> tuple[float, int]:
    """Where files have a leaf's tensor: the embedding, an encoder's layers, a decoder's, the rest."""
    if path.startswith("embed."):
        return -1, 0
    return next(((-LAYER_ATOMS.index(stack), at[stack]) for stack in LAYER_ATOMS if stack in at), (1, 0))


def write_model(folder: Path, config: HFConfig, shard_nbytes: int = SHARD_NBYTES, sparse: bool = False) -> int:
    """Write a model into a new folder; `sparse`: true headers over zeros that take no disk, and no tokenizer. The same
    config and shards make the same bytes. Returns how many bytes the weights have."""
    held = tensor_entries(config)
    folder.mkdir(parents=True)
    groups = split_into_shards(held, shard_nbytes)
    layouts = lay_out_files(
        [(name, sorted(group), None) for name, group in groups]
    )  # within a file as safetensors sorts
    values, numbers = None if sparse else _values(config["torch_dtype"]), itertools.count()
    for layout in layouts:
        _write_file(folder / layout.name, layout, values, numbers)
    if len(layouts) > 1:
        (folder / INDEX_FILE).write_bytes(encode_index(layouts))
    for name, content in ({"config.json": config} if sparse else _settings(config)).items():
        (folder / name).write_bytes(json_bytes(content))
    return sum(nbytes for *_, nbytes in held)


def _values(dtype: str) -> RandomBlock:
    width = 8 * itemsize(dtype)
    free = tuple(low + bit for low in range(0, 64, width) for bit in range(width) if FREE_BITS[dtype] >> bit & 1)
    normals = np.random.default_rng(SEED).standard_normal(BLOCK_NBYTES // itemsize(dtype), np.float32) * np.float32(STD)
    if dtype == "bfloat16":
        return RandomBlock((normals.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64), free)
    return RandomBlock(normals.astype(dtype, copy=False).view(np.uint64), free)


def _write_file(path: Path, layout: SafetensorsLayout, values: RandomBlock | None, numbers: Iterator[int]) -> None:
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


def _settings(config: HFConfig) -> dict[str, object]:
    tokens = {f"token{number}": number for number in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "token0"},
    }
    return {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": family_of(config).arch_config(config).max_positions or NO_LENGTH_LIMIT,
        },
    }


def _config(text: str) -> HFConfig:
    if text in PUBLISHED:
        return PUBLISHED[text]
    try:
        return {"torch_dtype": "float32", **json.loads(Path(text).read_text())}
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"`{text}` is neither an alias nor a config.json") from error


def _field(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}` is not KEY=JSON") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model that the arguments ask for; one line on stdout says what it is."""
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=_config, metavar="NAME", help="an alias (`prep models`), or a config.json")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=FREE_BITS, help="of all weights; default: as published")
    parser.add_argument("--layers", type=int, help="another depth, widths stay real")
    parser.add_argument("--shard-gb", type=float, default=5, help="decimal GB a file; default: 5")
    parser.add_argument("--sparse", action="store_true", help="zeros that take no disk, under true headers")
    parser.add_argument("--set", type=_field, action="append", default=[], metavar="KEY=JSON", help="a config field")
    given = parser.parse_args(arguments)
    try:
        config = override_config(given.config, given.dtype, given.layers, dict(given.set))
        nbytes = write_model(given.out, config, int(given.shard_gb * 10**9), given.sparse)
    except (PrepError, FileExistsError) as error:
        parser.error(str(error))
    print(f"{given.out}: {format_bytes(nbytes)} in {len(tensor_entries(config))} tensors")


if __name__ == "__main__":
    main()
