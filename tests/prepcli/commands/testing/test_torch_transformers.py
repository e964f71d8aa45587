"""Tiny models of transformers: logarithms that do not depend on the CPU, and shapes of the tensors in files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from prepcli.commands.testing.torch_transformers import exact_log, tensor_shapes
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_configs import GPT_NEOX, T5

torch = lazy_module("torch")


def test_exact_log_rounds_the_exact_logarithm():
    values = np.arange(1, 5000, dtype=np.float32) / np.float32(7)
    with exact_log():
        logs = torch.log(torch.tensor(values))
    assert logs.dtype == torch.float32
    np.testing.assert_array_equal(
        logs.numpy(), np.array([math.log(value) for value in values], np.float32)
    )


def test_exact_log_restores_torch_log_after_an_error():
    native_log = torch.log
    with pytest.raises(TypeError), exact_log():
        torch.log(torch.tensor(1.0), "no such argument")
    assert torch.log is native_log


@pytest.mark.parametrize(
    ("config", "head"), [(GPT_NEOX, "embed_out.weight"), (T5, "lm_head.weight")], ids=["neox", "t5"]
)
def test_untied_head_has_one_tensor(config: dict[str, Any], head: str):
    lazy_module("transformers")
    shapes = tensor_shapes(config | {"tie_word_embeddings": False})
    heads = [name for name in shapes if name in ("embed_out.weight", "lm_head.weight")]
    assert heads == [head]
