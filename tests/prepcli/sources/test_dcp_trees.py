"""State dicts of torchtitan in boxes of several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.grids import ChunkGrid
from prepcli.algebra.row_text import parse_row
from prepcli.algebra.strided_copies import ChunkedLocation
from prepcli.core.errors import PrepError
from prepcli.formats.torch_dcp import DcpBox, DcpFolder, DcpTensor
from prepcli.models.families.llama import FAMILY as LLAMA
from prepcli.planning.libraries import TORCHTITAN
from prepcli.sources.dcp_trees import match_dcp_tree

CONFIG: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}


def embedding_in_boxes(*starts: int) -> DcpFolder:
    """Return a checkpoint of an embedding [6, 8] with boxes that begin at these rows."""
    boxes: list[DcpBox] = []
    for start, stop in zip(starts, (*starts[1:], 6)):
        boxes.append(DcpBox((start, 0), (stop - start, 8), 0, 32 * start, None))
    tensor = DcpTensor("tok_embeddings.weight", "float32", (6, 8), tuple(boxes))
    return DcpFolder((tensor,), (), (), "", {})


def test_boxes_of_two_ranks_are_the_chunks_of_a_tensor():
    tensors: list[DcpTensor] = []
    for path, row in LLAMA.layouts["torchtitan"].parameters.items():
        shape = bind_row(parse_row(row.row), LLAMA.sizes(CONFIG)).leaf_shape
        box = DcpBox((0,) * len(shape), shape, 0, 0, None)
        tensors.append(DcpTensor(path.format(layers=0), "float32", shape, (box,)))
    # The second rank has two rows, in file 1.
    halves = DcpBox((0, 0), (4, 8), 0, 512, None), DcpBox((4, 0), (2, 8), 1, 640, None)
    tensors[0] = DcpTensor("tok_embeddings.weight", "float32", (6, 8), halves)
    tree = match_dcp_tree(
        DcpFolder(tuple(tensors), (), (), "", {}), LLAMA, CONFIG, "step-3", library=TORCHTITAN
    )
    embedding = next(tensor for tensor in tree.tensors if tensor.name == "embed_tokens.weight")
    (region,) = embedding.placement
    assert isinstance(region, ChunkedLocation)
    assert region.grid == ChunkGrid((6, 8), (4, 8))
    assert region.placement.find((0, 0)) == (0, 512)
    assert region.placement.find((1, 0)) == (1, 640)


@pytest.mark.parametrize("starts", [(0, 2), (0, 1, 2), (0, 3, 5)])
def test_rows_that_form_no_grid_are_refused(starts: tuple[int, ...]):
    with pytest.raises(PrepError, match=r"tok_embeddings\.weight is not supported"):
        match_dcp_tree(embedding_in_boxes(*starts), LLAMA, CONFIG, "step-3", library=TORCHTITAN)
