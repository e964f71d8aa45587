"""Tiny models: random tensors, and the logarithms and the shapes of tensors in transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from prepcli.commands.operations import model_outputs
from prepcli.commands.testing.tiny_model import exact_log, random_tensors, tensor_shapes
from prepcli.core.errors import PrepError
from tests.helpers.later_configs import LATER_FAMILIES
from tests.helpers.tiny_configs import GPT_NEOX, ODD_HEADS, T5


def test_exact_log_rounds_the_exact_logarithm():
    torch = pytest.importorskip("torch")
    values = np.arange(1, 5000, dtype=np.float32) / np.float32(7)
    with exact_log():
        logs = torch.log(torch.tensor(values))
    assert logs.dtype == torch.float32
    np.testing.assert_array_equal(
        logs.numpy(), np.array([math.log(value) for value in values], np.float32)
    )


def test_exact_log_restores_torch_log_after_an_error():
    torch = pytest.importorskip("torch")
    native_log = torch.log
    with pytest.raises(TypeError), exact_log():
        torch.log(torch.tensor(1.0), "no such argument")
    assert torch.log is native_log


@pytest.mark.parametrize(
    ("config", "head"), [(GPT_NEOX, "embed_out.weight"), (T5, "lm_head.weight")], ids=["neox", "t5"]
)
def test_untied_head_has_one_tensor(config: dict[str, Any], head: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shapes = tensor_shapes(config | {"tie_word_embeddings": False})
    heads = [name for name in shapes if name in ("embed_out.weight", "lm_head.weight")]
    assert heads == [head]


def test_random_factors_of_the_residual_stream_are_around_one():
    # Factors around 0 would leave a residual stream of rounding errors.
    tensors = random_tensors(LATER_FAMILIES["doge"])
    factors = [tensor for name, tensor in tensors.items() if name.endswith("_residual")]
    assert len(factors) == 4
    for values in factors:
        assert abs(values.mean() - 1) < 0.2
        assert 0.1 < np.std(values) < 0.3


def test_missing_reference_packages_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_outputs, "find_spec", lambda name: None)
    with pytest.raises(PrepError) as caught:
        tensor_shapes(ODD_HEADS["gpt2"])
    assert caught.value.why == "torch and transformers not installed"
    assert caught.value.hint == "pip install 'prepcli[hf]' torch"
