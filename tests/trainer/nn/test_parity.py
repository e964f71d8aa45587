"""Logits, gradients and rotary embeddings of every family against transformers."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.testing.checks import FamilyUnderTest, check_gradients, check_logits
from prepcli.commands.testing.tiny_model import (
    loss_and_gradients,
    model_logits,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
    torch_logits,
    torch_model,
    with_padded_vocab,
)
from prepcli.core.json_values import JsonObject
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.registry import FAMILIES, family_of
from tests.golden import make_decoders
from tests.golden.make_decoders import LENGTHS, Golden, load
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import (
    DENSE_FAMILIES,
    FIRST_FAMILIES,
    GOLDEN,
    GPT_NEOX,
    GPTJ,
    LIVE,
    LLAMA,
    LONG_ROPE,
    NEWER_FAMILIES,
    PHI3,
    T5,
)
from tests.helpers.training_plans import rope_table
from trainer.nn.model_spec import ForwardConfig
from trainer.recipe.model_table import Model, override_rope

# Tests of logits, losses and gradients against golden files with the results of transformers.

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
    # layers that are not scanned, cross-attention
    *(("gpt_neo", 0), ("t5-gated", 3)),
    # low-rank keys and values with experts, state spaces
    *(("deepseek_v3", 3), ("mamba2", 3)),
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
    assert {name: load_cached(name).config for name in paths} == json.loads(json.dumps(GOLDEN))
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
    slow_except(VARIANTS, (VARIANTS[6],)),
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


# Configs with the rotary embedding of a recipe, read by the transformers library (the `parity` extra).

lazy_module("torch")

lazy_module("transformers")

LINEAR, DYNAMIC = ({"rope_type": name, "factor": 4.0} for name in ("linear", "dynamic"))

YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 20, "truncate": False}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

LONG: JsonObject = {**LONG_ROPE, "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}

CASES: dict[str, tuple[dict[str, Any], Model]] = {
    "llama-linear": (LLAMA, rope_table(LINEAR, max_positions=256)),
    "llama-dynamic": (LLAMA, rope_table(DYNAMIC)),
    "llama-yarn": (LLAMA, rope_table(YARN, max_positions=256)),
    "llama-llama3": (
        LLAMA,
        rope_table(LLAMA3 | {"original_max_position_embeddings": 32}, max_positions=512),
    ),
    "llama-theta": (LLAMA, rope_table(theta=5e5, max_positions=512)),
    "llama-of-yarn": (LIVE["llama-yarn"], rope_table(YARN, 3e4, 512)),
    "llama-version-5": (LIVE["llama-version-5"], rope_table(YARN, max_positions=256)),
    "llama-both": (LIVE["llama-both-spellings"], rope_table(YARN, theta=3e4)),
    "gpt_neox-yarn": (GPT_NEOX, rope_table(YARN, 3e4, 256)),
    "gpt_neox-theta": (GPT_NEOX | {"rotary_emb_base": 500}, rope_table(theta=5e5)),
    "gpt_neox-version-5": (LIVE["gpt_neox-version-5"], rope_table(LINEAR, theta=5e5)),
    "gptj-positions": (GPTJ, rope_table(max_positions=512)),
    "phi3-longrope": (
        PHI3,
        rope_table(LONG | {"original_max_position_embeddings": 32}, max_positions=512),
    ),
    "phi3-positions": (LIVE["phi3-version-5"], rope_table(max_positions=512)),
}

FAST = ("gpt_neox-yarn", "phi3-longrope")


@pytest.mark.parametrize("name", slow_except(CASES, FAST))
def test_overridden_rope_matches_transformers(name: str, tmp_path: Path):
    subject = FamilyUnderTest(override_rope(*CASES[name]), tmp_path)
    for length in (7, 300):
        check_logits(subject, (length,))


def test_overridden_rope_changes_the_logits():
    """The comparison above would also pass if both libraries ignored the scaling."""
    base, overrides = CASES["llama-yarn"]
    tensors, batch = random_tensors(base, seed=3), random_batch(base["vocab_size"], 1, 300, 4)
    before, after = (
        model_logits(tiny.model, tiny.params_from_tensors(tensors), batch)
        for tiny in map(tiny_transformer, (base, override_rope(base, overrides)))
    )
    assert abs(before - after).max() > 1e-3


# Tests of logits and gradients against the transformers library, which must be installed (the `parity` extra).

torch = lazy_module("torch")

lazy_module("transformers")

# The layers of all other families are scanned here.
UNSCANNED_FAMILIES = ("gpt2", "gpt_neo", "llama")

# Lengths of right-padded rows.
SHORT, LIVE_LONG = ((7, 4), (300,))

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def batch_lengths(config: HFConfig) -> list[tuple[int, ...]]:
    """Return the lengths of the rows of each batch.

    One program computes all rows, unless the length of the batch changes the results or the shape of the source.
    """
    arch_config = family_of(config).arch_config(config)
    rope_types = {rope.rope_type for rope in arch_config.ropes}
    if arch_config.encoder is not None or rope_types & {*LENGTH_DEPENDENT_ROPES}:
        return [SHORT, LIVE_LONG]
    return [(*SHORT, *LIVE_LONG)]


# Configs with fields that golden files lack and that change the computation.
LIVE_FAST = (
    *("gpt2-by-depth-upcast", "gpt_neo-odd", "opt-bare", "gpt_neox-version-5", "llama-yarn-mscale"),
    *("mistral-no-window", "qwen2-kinds", "qwen3-biases", "qwen3_moe-listed", "gemma2-no-caps"),
    *("gemma3_text-truncate", "phi3-su", "t5-aliases"),
)


# test_parity covers golden configs
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    "name", slow_except((name for name in LIVE if name not in GOLDEN), LIVE_FAST)
)
def test_live_logits_match_transformers(name: str, tmp_path: Path):
    subject = FamilyUnderTest(LIVE[name], tmp_path)
    for lengths in batch_lengths(subject.config):
        check_logits(subject, lengths)


STORED_HEAD_CHANGES = {
    "null": {"tie_word_embeddings": None},
    "true, unscaled": {"scale_decoder_outputs": False},
}


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("changes", STORED_HEAD_CHANGES.values(), ids=STORED_HEAD_CHANGES)
def test_logits_of_t5_with_stored_head_match_transformers(changes: dict[str, Any]):
    config = T5 | changes
    tensors, tiny = (
        random_tensors(config, has_stored_head=True),
        tiny_transformer(config, has_stored_head=True),
    )
    assert "lm_head.weight" in tensors
    batch = random_batch(config["vocab_size"], 2, 7, 4, has_source=True)
    logits = model_logits(tiny.model, tiny.params_from_tensors(tensors), batch)
    expected = torch_logits(torch_model(config, tensors), batch, (7, 7))
    assert abs(logits - expected).max() <= 2e-5


# One config for each kind of layer that golden files lack.
WITH_GRADIENTS = [
    *(
        "gpt2-names",
        "gpt_neo-odd",
        "gpt_neo-wide",
        "llama-groups",
        "llama-biases",
        "gptj-tied",
        "opt-bare",
    ),
    *("qwen3_moe-plain", "gemma3_text-version-5", "phi3-version-5", "t5-untied", "gpt2-by-depth"),
]


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", slow_except(WITH_GRADIENTS, ("opt-bare",)))
def test_gradients_with_padded_vocab_match_torch(name: str, tmp_path: Path):
    is_scanned = LIVE[name]["model_type"] not in UNSCANNED_FAMILIES
    check_gradients(FamilyUnderTest(LIVE[name], tmp_path), is_scanned, loss_rtol=1e-6)


# A decoder with experts, and an encoder with its decoder.
FAST_GOLDEN = ("mixtral", "t5")


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", slow_except(GOLDEN, FAST_GOLDEN))
def test_golden_files_match_installed_transformers(name: str):
    golden = make_decoders.load(name)
    current = make_decoders.compute(GOLDEN[name], make_decoders.long_length(name))
    assert abs(golden.short_logits - current.short_logits).max() <= 2e-5
    assert abs(golden.long_logits - current.long_logits).max() <= 2e-5
    for tensor, expected in golden.gradients.items():
        assert relative_error(current.gradients[tensor], expected) <= 1e-5
