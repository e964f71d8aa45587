"""The golden Flax and EasyLM files, and their content as the msgpack package decodes it in the way of Flax."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from prepcli.engine.fills import numpy_dtype
from prepcli.formats.msgpack import KeyPath, MsgpackKind

FOLDER = Path(__file__).parents[1] / "golden" / "flax"
LLAMA = FOLDER / "llama"
MODELS = [
    FOLDER / name
    for name in (
        *("gpt2", "neo", "llama", "gptj", "opt", "mistral", "gemma", "t5", "t5-gated"),
        *("bloom", "xglm", "mt5"),
    )
]
FILES: dict[str, MsgpackKind] = {
    **{f"{model.name}/flax/flax_model.msgpack": "flax" for model in MODELS},
    "llama/boxed.msgpack": "flax",
    "llama/flax_params.msgpack": "flax",
    "llama/pieces.msgpack": "flax",
    "llama/train_state.msgpack": "flax",
    "llama/stacked_0": "easylm",
    "llama/stacked_1": "easylm",
    "llama/streaming_params": "easylm",
    "llama/streaming_pieces": "easylm",
    "llama/streaming_train_state": "easylm",
}


def decode_msgpack(data: bytes, kind: MsgpackKind) -> dict[KeyPath, Any]:
    """Decode a file to arrays and other values by path."""
    if kind == "flax":
        return dict(_leaves((), _unpack(data)))
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    return {
        path: leaf for key, value in unpacker for path, leaf in _leaves(tuple(key), _unpack(value))
    }


def _unpack(data: bytes) -> Any:
    """Unpack msgpack data with arrays."""
    return msgpack.unpackb(data, ext_hook=_array, raw=False)


def _array(code: int, data: bytes) -> np.ndarray:
    """Decode an array, the extension type 1 of Flax."""
    assert code == 1
    shape, dtype, payload = msgpack.unpackb(data)
    return np.frombuffer(payload, numpy_dtype(dtype)).reshape(shape)


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of a nested dict by path, and join arrays that Flax stores in chunks."""
    if not isinstance(value, dict):
        yield path, value
    elif "__msgpack_chunked_array__" in value:
        chunks = [value["chunks"][str(i)] for i in range(len(value["chunks"]))]
        yield (
            path,
            np.concatenate(chunks).reshape(
                [value["shape"][str(i)] for i in range(len(value["shape"]))]
            ),
        )
    else:
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
