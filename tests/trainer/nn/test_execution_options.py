"""Tests that the options of a forward pass change losses and gradients by rounding only."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import jax
import pytest

from prepcli.commands.testing.tiny_model import (
    loss_and_gradients,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import ACTIVATION_NAMES
from prepcli.models.attention_kernels import AUTO, KERNEL_NAMES
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn.kernels import KERNELS
from trainer.nn.model_spec import AttentionOptions, ForwardConfig
from trainer.recipe.tables import Model as RecipeModel

LENGTH = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "small tiles": {"attention_options": AttentionOptions("blockwise", 8, 16)},
    "uneven tiles": {
        "attention_options": AttentionOptions("blockwise", 7, 64),
        "remat_policy": "nothing_saveable",
    },
    "MLP chunks": {"ffn_chunk_size": 9},
    "all chunked": {
        "attention_options": AttentionOptions("blockwise", 16, 8),
        "ffn_chunk_size": 16,
        "head_chunk_size": 8,
        "remat_policy": "dots_with_no_batch_dims_saveable",
        "scan_layers": False,
    },
    "named activations": {"remat_policy": ACTIVATION_NAMES},
    "offload": {
        "attention_options": AttentionOptions("blockwise", 16, 8),
        "remat_policy": ("q", "k", "v", "attention_output"),
        "offload": "residuals",
    },
}
FAMILY_CASES = [
    *(("llama-biases", name) for name in OPTIONS),
    *((family, "all chunked") for family in ("gpt_neo", "gemma2", "mixtral", "t5")),
    *((family, "named activations") for family in ("gemma2", "t5")),
    ("mixtral", "MLP chunks"),
]
FAST_CASES = [
    *(("llama-biases", name) for name in ("uneven tiles", "offload")),
    ("mixtral", "MLP chunks"),
]


@cache
def results(name: str, options: str) -> tuple[float, dict[str, Any]]:
    """Return the mean loss of a tiny model, and the gradient of each tensor."""
    config = GOLDEN[name]
    tiny = tiny_transformer(config)
    forward_config = ForwardConfig(**OPTIONS.get(options, {}))
    batch = random_batch(
        int(config["vocab_size"]), 4, LENGTH, 1, tiny.model.arch_config.encoder is not None
    )
    params = tiny.params_from_tensors(random_tensors(config))
    loss, gradients = loss_and_gradients(tiny.model, params, batch, forward_config)
    return float(loss), tiny.tensors_from_params(jax.device_get(gradients))


@pytest.mark.parametrize(("family", "options"), slow_except(FAMILY_CASES, FAST_CASES))
def test_kernels_and_chunks_change_rounding_only(family: str, options: str):
    loss, gradients = results(family, options)
    expected_loss, expected = results(family, "")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    errors = {
        name: relative_error(gradients[name], gradient) for name, gradient in expected.items()
    }
    assert errors == pytest.approx(dict.fromkeys(expected, 0), abs=1e-5)


def test_kernel_names_match_kernels_and_recipes():
    assert tuple(KERNELS) == KERNEL_NAMES
    assert get_args(RecipeModel.model_fields["attention_kernel"].annotation) == (
        AUTO,
        *KERNEL_NAMES,
    )


def test_unknown_kernel_is_a_usage_error():
    with pytest.raises(
        PrepError, match=r"unknown `model.attention_kernel` .flash..*reference, blockwise"
    ):
        AttentionOptions("flash")


@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_policies_that_save_scores_exclude_blockwise_attention(policy: str):
    with pytest.raises(PrepError, match="the policy saves the scores of all tiles"):
        ForwardConfig(remat_policy=policy, attention_options=AttentionOptions("blockwise"))
