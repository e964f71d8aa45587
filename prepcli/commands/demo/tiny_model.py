"""A tiny GPT-Neo in Hugging Face format: real names, shapes and settings, with random weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prepcli.algebra.axis_map import bind_row
from prepcli.formats.safetensors import INDEX_FILE
from prepcli.formats.safetensors_layout import (
    LayoutEntry,
    SafetensorsLayout,
    encode_index,
    lay_out_files,
    split_into_shards,
)
from prepcli.models.families.gpt_neo import FAMILY
from prepcli.models.parameters import parameter_rows
from prepcli.planning.tensors import FileTensor
from prepcli.targets.hf_folder import json_bytes

SEED = 0
# Yields three files.
SHARD_NBYTES = 20_000_000
STD = 0.02

END_TOKEN = "<|endoftext|>"
UNKNOWN_TOKEN = "<unk>"
# Syllables of one or two letters after a consonant, e.g. `ba`, `bai`, `ban`.
CONSONANTS = "bdfghklmnprstvz"
ENDINGS = [
    "a",
    "e",
    "i",
    "o",
    "u",
    "ai",
    "ei",
    "ou",
    "an",
    "en",
    "in",
    "on",
    "un",
    "al",
    "el",
    "ol",
    "ul",
]
WORDS = tuple(start + end for start, end in itertools.product(CONSONANTS, ENDINGS))
# 257 words: an odd size that no mesh divides.
VOCABULARY = (END_TOKEN, UNKNOWN_TOKEN, *WORDS)

CONFIG = {
    "architectures": ["GPTNeoForCausalLM"],
    "model_type": "gpt_neo",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 512,
    "num_layers": 4,
    "num_heads": 8,
    # GPT-Neo takes None as 4 * hidden_size = 2048.
    "intermediate_size": None,
    # Two times global and local: 4 layers.
    "attention_types": [[["global", "local"], 2]],
    "window_size": 64,
    "max_position_embeddings": 256,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": STD,
    "attention_dropout": 0.0,
    "embed_dropout": 0.0,
    "resid_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
}


def write_tiny_model(folder: Path) -> int:
    """Write the model to a new folder: weights in three files, settings, and a word-level tokenizer.

    Args:
        folder: The folder, which does not exist yet.

    Returns:
        Bytes of the weights. Each call writes the same files.
    """
    folder.mkdir()
    shards = split_into_shards(list(_layout_entries()), SHARD_NBYTES)
    layouts = lay_out_files([(name, entries, None) for name, entries in shards])
    nbytes = 0
    for layout in layouts:
        _write_file(folder / layout.name, layout)
        nbytes += sum(tensor.nbytes for tensor in layout.tensors)
    (folder / INDEX_FILE).write_bytes(encode_index(layouts))
    for name, content in _config_fields().items():
        (folder / name).write_bytes(json_bytes(content))
    return nbytes


def _layout_entries() -> Iterator[LayoutEntry]:
    """Yield the header entry of each stored tensor, by name. The tied head is not stored."""
    sizes = FAMILY.sizes(CONFIG)
    shapes = {}
    for path, row in parameter_rows(FAMILY, CONFIG).items():
        if path == FAMILY.tying.head_leaf:
            continue
        bound = bind_row(row, sizes)
        for name, _ in bound.tensors():
            shapes[FAMILY.prefix + name] = bound.source_shape
    for name, shape in sorted(shapes.items()):
        yield name, "float32", shape, 4 * math.prod(shape)


def _write_file(path: Path, layout: SafetensorsLayout) -> None:
    with path.open("wb") as file:
        file.write(layout.header)
        for tensor in layout.tensors:
            file.write(_random_values(tensor).astype("<f4", copy=False).data)


def _random_values(tensor: FileTensor) -> np.ndarray:
    """Return normal values with standard deviation STD, around 1 for the scale of a norm."""
    # The name seeds the values, so they do not depend on the order of the tensors or on their file.
    random = np.random.default_rng([SEED, *tensor.name.encode()])
    values = random.standard_normal(tensor.shape, np.float32) * np.float32(STD)
    # The scale of a norm is the only weight with one dim.
    is_scale = len(tensor.shape) == 1 and tensor.name.endswith(".weight")
    return values + np.float32(is_scale)


def _config_fields() -> dict[str, object]:
    return {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0},
        "tokenizer.json": _tokenizer_document(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "bos_token": END_TOKEN,
            "eos_token": END_TOKEN,
            "unk_token": UNKNOWN_TOKEN,
        },
    }


def _tokenizer_document() -> dict[str, object]:
    """Return the tokenizer in the format of `tokenizers`: one token per word, words separated by spaces."""
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": VOCABULARY.index(token), "content": token, **flags}
            for token in (END_TOKEN, UNKNOWN_TOKEN)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token: number for number, token in enumerate(VOCABULARY)},
            "unk_token": UNKNOWN_TOKEN,
        },
    }
