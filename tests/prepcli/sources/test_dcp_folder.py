"""State dicts of torchtitan in boxes of several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.grids import ArrayPart, ArrayParts
from prepcli.algebra.rows import parse_row
from prepcli.models.registry import FAMILIES
from prepcli.planning.arrays import Array, parted_array, whole_array
from prepcli.planning.libraries import TORCHTITAN
from prepcli.sources.openers.tensor_files import match_dcp_tree
from tests.helpers.stored_arrays import read_tensor

LLAMA = FAMILIES["llama"]
CONFIG: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}


def embedding_in_boxes(*starts: int) -> Array:
    """Return an embedding [6, 8] in boxes that begin at these rows, each in a file of its own."""
    parts: list[ArrayPart] = []
    for file, (start, stop) in enumerate(zip(starts, (*starts[1:], 6))):
        parts.append(ArrayPart(((start, stop), (0, 8)), file, 32 * start, (32, 4)))
    return parted_array("tok_embeddings.weight", "float32", (6, 8), ArrayParts(tuple(parts)))


@pytest.mark.parametrize("starts", [(0, 4), (0, 2), (0, 1, 2), (0, 3, 5)])
def test_boxes_of_ranks_are_parts_of_a_tensor(starts: tuple[int, ...]):
    tensors: list[Array] = []
    for path, row in LLAMA.layouts["torchtitan"].parameters.items():
        shape = bind_row(parse_row(row.row), LLAMA.sizes(CONFIG)).leaf_shape
        tensors.append(whole_array(path.format(layers=0), "float32", shape, (0, 0)))
    tensors[0] = embedding_in_boxes(*starts)
    tree = match_dcp_tree(tensors, LLAMA, CONFIG, "step-3", library=TORCHTITAN)
    embedding = next(tensor for tensor in tree.tensors if tensor.name == "embed_tokens.weight")
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    assert np.array_equal(
        read_tensor(embedding.placement[0], values, [values.tobytes()] * len(starts)), values
    )
