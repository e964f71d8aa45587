"""Tests of the number of calls between the model's functions and the products of its layers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from prepcli.commands.testing.tiny_model import tiny_transformer
from prepcli.models.param_tree import unflatten_tree
from tests.helpers.tiny_configs import LLAMA
from trainer.nn import attention, mlp, transformer
from trainer.nn.model_spec import ForwardConfig
from trainer.nn.projections import linear


def calls_to_products(
    config: dict[str, Any], forward_config: ForwardConfig, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[str]]:
    """Trace a model's logits; return the project's calls from `compute_logits` to `linear`.

    The key is the module that calls `linear`.
    """
    calls_by_module: dict[str, list[str]] = {}

    def record_calls(x: Array, weights: Mapping[str, Array], **options: Any) -> Array:
        names = ["linear"]
        modules: list[str] = []
        frame = sys._getframe(1)
        while frame.f_code.co_name != "compute_logits":
            module = frame.f_globals["__name__"]
            if module.startswith("trainer."):
                names.append(frame.f_code.co_name)
                modules.append(module)
            assert frame.f_back is not None
            frame = frame.f_back
        calls_by_module.setdefault(modules[0], names[::-1])
        return linear(x, weights, **options)

    for module in (attention, mlp):
        monkeypatch.setattr(module, "linear", record_calls)
    model = tiny_transformer(config).model
    params = unflatten_tree(
        {path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for path, leaf in model.leaves.items()}
    )
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    jax.eval_shape(
        lambda params, tokens: transformer.compute_logits(params, tokens, model, forward_config),
        params,
        tokens,
    )
    return calls_by_module


@pytest.mark.parametrize(("is_scanned", "num_more"), [(False, 0), (True, 2)])
def test_products_of_a_layer_are_few_calls_deep(
    is_scanned: bool, num_more: int, monkeypatch: pytest.MonkeyPatch
):
    """A scan over layers adds its caller and its body. JAX's own calls are not counted."""
    options = ForwardConfig(scan_layers=is_scanned)
    calls = calls_to_products(LLAMA, options, monkeypatch)
    assert calls.keys() == {"trainer.nn.attention", "trainer.nn.mlp"}
    assert max(map(len, calls.values())) <= 7 + num_more, calls
