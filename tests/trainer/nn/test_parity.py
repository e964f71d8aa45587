"""Tests of logits, losses and gradients against golden files with the results of transformers."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import (
    loss_and_gradients,
    model_logits,
    random_tensors,
    relative_error,
    tiny_transformer,
    with_padded_vocab,
)
from prepcli.models.parameters import read_size
from prepcli.models.registry import FAMILIES
from tests.golden import make_decoders
from tests.golden.make_decoders import LENGTHS, Golden, load
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import DENSE_FAMILIES, FIRST_FAMILIES, GOLDEN, NEWER_FAMILIES
from trainer.nn.model_spec import ForwardConfig

LOGITS_ATOL = 2e-5
GRADIENTS_RTOL = 1e-5
WITHOUT_ROPE_VARIANTS = [
    name for name in GOLDEN if not name.startswith("llama-") or name == "llama-biases"
]
PADDED = [*((name, 3) for name in WITHOUT_ROPE_VARIANTS), ("gpt_neo", 0), ("llama-yarn", 0)]
# Name of the model, whether layers are stacked, on which axis, whether they are scanned, remat
# policy.
VARIANTS = [
    ("gpt2", True, 1, True, "none"),
    ("gpt2", False, 0, False, "none"),
    ("gpt_neo", True, 0, True, "none"),
    ("gpt_neo", True, 1, True, "nothing_saveable"),
    ("gpt_neo", True, 1, False, "none"),
    ("gpt_neo", False, 0, False, "nothing_saveable"),
    ("llama-biases", True, 1, True, "dots_with_no_batch_dims_saveable"),
    ("llama-biases", False, 0, False, "none"),
    ("t5", True, 1, True, "nothing_saveable"),
    ("deepseek_v3", True, 1, True, "nothing_saveable"),
    ("deepseek_v3", False, 0, False, "none"),
    ("ernie4_5_moe", True, 0, True, "dots_saveable"),
    ("ernie4_5_moe", False, 0, False, "none"),
    ("gpt_oss", True, 1, True, "dots_with_no_batch_dims_saveable"),
    ("t5-gated", False, 0, False, "none"),
    ("lfm2", True, 1, True, "nothing_saveable"),
    ("qwen3_5_text", False, 0, False, "dots_saveable"),
]
# Logits are compared for all models. One model stands for each kind of layer:
FAST_GRADIENTS = (
    # layers that are not scanned, parallel attention and MLP, norms around each part
    *(("gpt_neo", 0), ("gptj", 3), ("gemma2", 3)),
    # cross-attention, sinks, low-rank keys and values with experts
    *(("t5-gated", 3), ("gpt_oss", 3), ("deepseek_v3", 3)),
    # short convolutions, linear attention, state spaces
    *(("lfm2", 3), ("qwen3_5_text", 3), ("mamba2", 3)),
)
# Without a rotary embedding the softmax cancels the bias of keys.
CANCELLED = ("self_attn.k_proj.bias",)
WITHOUT_ROTATION = ("opt", "opt-350m", "biogpt", "xglm")

# Their rotary frequencies depend on the number of tokens, so that padding changes logits.
WITH_LENGTH_DEPENDENT_ROPE = ("llama-dynamic", "phi3-longrope")
# Corrections of a router's scores, and factors of the outputs of layers, have no gradient.
UNTRAINED_TENSORS = (
    "e_score_correction_bias",
    "expert_bias",
    "layer_scalar",
    "act_fn.beta",
    "act_fn.eps",
)

load_cached = cache(load)


def joined_batch(golden: Golden) -> dict[str, np.ndarray]:
    """Return the rows of `short`, right-padded to the length of `long`, and the row of `long`.

    One program then computes the logits of both.
    """
    batch = {}
    for name in golden.short:
        long_rows = golden.long[name]
        padding = long_rows.shape[1] - golden.short[name].shape[1]
        short_rows = np.pad(golden.short[name], ((0, 0), (0, padding)))
        batch[name] = np.concatenate([short_rows, long_rows])
    return batch


def max_short_logit_error(golden: Golden, logits: np.ndarray) -> float:
    """Return the largest error of the `short` logits outside of padding."""
    errors = [abs(logits[i, :n] - golden.short_logits[i, :n]).max() for i, n in enumerate(LENGTHS)]
    return float(max(errors))


def max_gradient_error(golden: Golden, gradients: dict[str, np.ndarray]) -> float:
    """Return the largest relative error of a tensor's gradient."""
    return max(
        relative_error(gradients[name], expected) for name, expected in golden.gradients.items()
    )


def test_every_config_has_a_small_golden_file():
    paths = {path.stem: path for path in make_decoders.FOLDER.glob("*.npz")}
    assert {name: load(name).config for name in paths} == json.loads(json.dumps(GOLDEN))
    assert all(path.stat().st_size < 200_000 for path in paths.values())


def test_golden_tensors_are_complete_and_random():
    for name in GOLDEN:
        golden = load_cached(name)
        assert {*golden.tensors} == {*random_tensors(golden.config)}, name
        trained = {name for name in golden.tensors if not name.endswith(UNTRAINED_TENSORS)}
        assert {*golden.gradients} == trained
        for tensor in golden.tensors.values():
            # The deviation of a few values may be small by chance, and one value has none.
            spread = tensor.std() if tensor.size > 8 else np.ptp(tensor)
            assert spread > 0.03 or tensor.size == 1, name


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_match_transformers(name: str):
    golden = load_cached(name)
    tiny = tiny_transformer(golden.config)
    params = tiny.params_from_tensors(golden.tensors)
    # A scan compiles equal layers once.
    forward_config = ForwardConfig(scan_layers=name not in FIRST_FAMILIES)
    if name in WITH_LENGTH_DEPENDENT_ROPE:
        short_logits = model_logits(tiny.model, params, golden.short, forward_config)
        long_logits = model_logits(tiny.model, params, golden.long, forward_config)
    else:
        logits = model_logits(tiny.model, params, joined_batch(golden), forward_config)
        short_logits = logits[:2]
        long_logits = logits[2:]
    assert max_short_logit_error(golden, short_logits) <= LOGITS_ATOL
    assert abs(long_logits - golden.long_logits).max() <= LOGITS_ATOL


@pytest.mark.parametrize(("name", "num_padding_rows"), slow_except(PADDED, FAST_GRADIENTS))
def test_loss_and_gradients_match_torch(name: str, num_padding_rows: int):
    """Padding rows of the vocabulary change nothing, whatever their values, and have gradients of exactly 0."""
    golden = load_cached(name)
    vocab = read_size(golden.config, "vocab_size", 1)
    config, tensors = with_padded_vocab(golden.config, golden.tensors, num_padding_rows, 50.0)
    tiny = tiny_transformer(config)
    forward_config = ForwardConfig(scan_layers=False, head_chunk_size=128)
    if name not in FIRST_FAMILIES:
        forward_config = dataclasses.replace(
            forward_config, scan_layers=True, remat_policy="nothing_saveable"
        )
    params = tiny.params_from_tensors(tensors)
    loss, gradient_tree = loss_and_gradients(tiny.model, params, golden.long, forward_config)
    gradients = tiny.tensors_from_params(gradient_tree)
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    for tensor, expected in golden.gradients.items():
        padding = gradients[tensor][expected.shape[0] :]
        gradients[tensor] = gradients[tensor][: expected.shape[0]]
        assert abs(gradients[tensor] - expected).max() <= GRADIENTS_RTOL * max(
            1, abs(expected).max()
        )
        assert padding.size == (
            expected.size // vocab * num_padding_rows if expected.shape[0] == vocab else 0
        )
        assert not padding.any()
    assert max_gradient_error(golden, gradients) <= GRADIENTS_RTOL


@pytest.mark.parametrize(
    ("name", "is_stacked", "axis", "is_scanned", "remat_policy"),
    slow_except(VARIANTS, (VARIANTS[5], VARIANTS[6])),
)
def test_gradients_do_not_depend_on_scan_or_remat(
    name: str, is_stacked: bool, axis: int, is_scanned: bool, remat_policy: str
):
    golden = load_cached(name)
    tiny = tiny_transformer(golden.config, is_stacked, axis)
    params = tiny.params_from_tensors(golden.tensors)
    forward_config = ForwardConfig(scan_layers=is_scanned, remat_policy=remat_policy)
    loss, gradients = loss_and_gradients(tiny.model, params, golden.long, forward_config)
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    assert max_gradient_error(golden, tiny.tensors_from_params(gradients)) <= GRADIENTS_RTOL


def test_every_family_has_a_golden_config():
    assert {str(config["model_type"]) for config in GOLDEN.values()} == {*FAMILIES}


def test_every_tensor_has_a_gradient():
    """Logits depend on every tensor, so that the comparison of logits covers all of them."""
    for name in (
        "gpt2",
        "gpt2-untied",
        "gpt_neo",
        "llama-biases",
        *NEWER_FAMILIES,
        *DENSE_FAMILIES,
    ):
        for tensor, gradient in load_cached(name).gradients.items():
            is_cancelled = name in WITHOUT_ROTATION and tensor.endswith(CANCELLED)
            # A sink is one of up to 300 keys.
            smallest = 1e-4 if tensor.endswith("sinks") else 1e-3
            assert np.linalg.norm(gradient) > smallest or is_cancelled, (name, tensor)


BFLOAT16 = ("gpt2", "gpt_neo", "llama", "gemma2", "mixtral", "t5")


@pytest.mark.parametrize("name", slow_except(BFLOAT16, ("gemma2",)))
def test_bfloat16_results_are_close_to_float32(name: str):
    golden = load_cached(name)
    tiny = tiny_transformer(golden.config)
    forward_config = ForwardConfig(dtype="bfloat16", scan_layers=False)
    params = tiny.params_from_tensors(golden.tensors)
    loss, gradient_tree = loss_and_gradients(tiny.model, params, golden.long, forward_config)
    assert loss == pytest.approx(golden.loss, rel=2e-2)
    gradients = tiny.tensors_from_params(gradient_tree)
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}
    assert 1e-4 < max_gradient_error(golden, gradients) < 0.2
