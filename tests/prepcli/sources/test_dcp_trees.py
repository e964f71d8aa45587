"""State dicts of torchtitan with boxes of unequal sizes."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.errors import PrepError
from prepcli.formats.torch_dcp import DcpBox, DcpFolder, DcpTensor
from prepcli.sources.dcp_trees import match_torchtitan
from trainer.models.families.llama import FAMILY as LLAMA

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


@pytest.mark.parametrize("starts", [(0, 2), (0, 1, 2), (0, 3, 5)])
def test_rows_that_form_no_grid_are_refused(starts: tuple[int, ...]):
    with pytest.raises(PrepError, match=r"tok_embeddings\.weight is not supported"):
        match_torchtitan(embedding_in_boxes(*starts), LLAMA, CONFIG, "step-3")
