"""Attention kernels, chosen by requirements and devices, which are data here, and rematerialization."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.models.activation_memory import (
    ACTIVATION_NAMES,
    REMAT_NONE,
    REMAT_POLICIES,
    SAVES_SCORES,
    check_remat,
    expert_block_length,
    saved_activations,
)
from prepcli.models.attention_kernels import (
    ANY_ACCELERATOR,
    CPU,
    CPU_MAX_DENSE_LENGTH,
    KERNEL_SPECS,
    MAX_DENSE_LENGTH,
    AttentionFeature,
    AttentionNeeds,
    DeviceKind,
    KernelSpec,
    check_mixer,
    check_saved_scores,
    rank_kernels,
    required_attention_features,
    run_features,
    unmet_needs,
)
from prepcli.models.registry import family_of
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn.model_spec import ModelSpec, build_model

TPU, ROCM = DeviceKind("tpu"), DeviceKind("rocm")
AMPERE, HOPPER = DeviceKind("cuda", (8, 0)), DeviceKind("cuda", (9, 0))
LLAMA = AttentionNeeds(
    frozenset({AttentionFeature.CAUSAL, AttentionFeature.GROUPED_HEADS}), "bfloat16", 128
)
NO_KERNEL = {AttentionFeature.SPLIT_SEQUENCE, AttentionFeature.SAVED_SCORES}
SHORT, LONG = MAX_DENSE_LENGTH, MAX_DENSE_LENGTH + 1
CPU_SHORT, CPU_LONG = CPU_MAX_DENSE_LENGTH, CPU_MAX_DENSE_LENGTH + 1


def needs(
    *features: AttentionFeature, dtype: str = "bfloat16", head_dim: int = 128
) -> AttentionNeeds:
    """Return the requirements of a causal model with more features."""
    return AttentionNeeds(LLAMA.features | {*features}, dtype, head_dim)


@pytest.mark.parametrize(
    ("needed", "device", "length", "names", "reason"),
    [
        (
            LLAMA,
            CPU,
            CPU_SHORT,
            "reference blockwise",
            "auto: sequences of up to 255 tokens; no kernel for cpu",
        ),
        (
            LLAMA,
            CPU,
            CPU_LONG,
            "blockwise reference",
            "auto: sequences of more than 255 tokens; no kernel for cpu",
        ),
        (
            LLAMA,
            ROCM,
            SHORT,
            "reference blockwise",
            "auto: sequences of up to 1,024 tokens; no kernel for rocm",
        ),
        (
            LLAMA,
            ROCM,
            LONG,
            "blockwise reference",
            "auto: sequences of more than 1,024 tokens; no kernel for rocm",
        ),
        (LLAMA, AMPERE, SHORT, "cudnn reference blockwise", "auto: the kernel for cuda"),
        (LLAMA, TPU, LONG, "pallas-splash blockwise reference", "auto: the kernel for tpu"),
        (
            needs(AttentionFeature.SOFTCAP),
            TPU,
            LONG,
            "pallas-splash blockwise reference",
            "auto: the kernel for tpu",
        ),
        (
            needs(AttentionFeature.SOFTCAP),
            HOPPER,
            LONG,
            "blockwise reference",
            "auto: sequences of more than 1,024 tokens; cudnn does not support softcap of scores",
        ),
        (
            needs(dtype="float32"),
            HOPPER,
            SHORT,
            "reference blockwise",
            "auto: sequences of up to 1,024 tokens; cudnn does not support float32",
        ),
        (
            needs(head_dim=256),
            HOPPER,
            LONG,
            "cudnn blockwise reference",
            "auto: the kernel for cuda",
        ),
        (
            needs(head_dim=256),
            AMPERE,
            LONG,
            "blockwise reference",
            "auto: sequences of more than 1,024 tokens; cudnn supports heads of up to 128 elements, not 256",
        ),
        (
            needs(AttentionFeature.SAVED_SCORES),
            CPU,
            CPU_LONG,
            "reference",
            "auto: sequences of more than 255 tokens; no kernel for cpu; blockwise does not support remat policies "
            "that save scores",
        ),
    ],
)
def test_auto_ranks_the_capable_kernels(
    needed: AttentionNeeds, device: DeviceKind, length: int, names: str, reason: str
):
    choices = rank_kernels("auto", needed, device=device, length=length)
    assert [choice.name for choice in choices] == names.split()
    assert choices[0].reason == reason


@given(
    features=st.frozensets(st.sampled_from([*AttentionFeature])).filter(
        lambda chosen: not {*chosen} >= NO_KERNEL
    ),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    head_dim=st.integers(1, 300),
    device=st.sampled_from([CPU, TPU, ROCM, AMPERE, HOPPER, DeviceKind("cuda")]),
    length=st.integers(1, 4096),
)
def test_auto_never_ranks_an_incapable_kernel(
    features: frozenset[AttentionFeature],
    dtype: str,
    head_dim: int,
    device: DeviceKind,
    length: int,
):
    needed = AttentionNeeds(features, dtype, head_dim)
    names = [choice.name for choice in rank_kernels("auto", needed, device=device, length=length)]
    assert {*names} == {
        name for name, spec in KERNEL_SPECS.items() if not [*unmet_needs(spec, needed, device)]
    }
    assert ("reference" in names) == (AttentionFeature.SPLIT_SEQUENCE not in features)


@pytest.mark.parametrize(
    ("name", "needed", "device", "why"),
    [
        ("cudnn", LLAMA, CPU, "it runs on cuda, not on cpu"),
        ("cudnn", needs(dtype="float32"), HOPPER, "it does not support float32"),
        (
            "cudnn",
            needs(head_dim=20),
            HOPPER,
            "it needs a head width that is a multiple of 8, not 20",
        ),
        ("cudnn", needs(AttentionFeature.SEGMENTS), HOPPER, "it does not support segment ids"),
        (
            "cudnn",
            needs(AttentionFeature.DROPOUT, AttentionFeature.FCM),
            HOPPER,
            "it does not support dropout of probabilities; it does",
        ),
        ("pallas-splash", LLAMA, HOPPER, "it runs on tpu, not on cuda"),
        (
            "pallas-splash",
            needs(AttentionFeature.SCORE_BIAS),
            TPU,
            "it does not support relative position bias",
        ),
        (
            "pallas-splash",
            needs(AttentionFeature.SPLIT_SEQUENCE),
            TPU,
            "it does not support sequences split over devices",
        ),
    ],
)
def test_requested_kernel_without_a_feature_is_a_usage_error(
    name: str, needed: AttentionNeeds, device: DeviceKind, why: str
):
    with pytest.raises(UsageError) as caught:
        rank_kernels(name, needed, device=device, length=SHORT)
    assert caught.value.what == f"attention kernel `{name}` cannot compute this model's attention"
    assert caught.value.why.startswith(why)
    assert caught.value.hint == '`model.attention_kernel = "auto"`'


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_requested_kernel_is_the_only_choice(name: str):
    (choice,) = rank_kernels(name, LLAMA, device=HOPPER, length=LONG)
    assert str(choice) == f"attention {name} (set by the recipe)"


def test_unknown_kernel_is_a_usage_error():
    with pytest.raises(
        UsageError, match=r"unknown `model.attention_kernel` 'flash' - supported: reference, "
    ):
        rank_kernels("flash", LLAMA, device=CPU, length=SHORT)


def test_run_without_any_kernel_is_a_usage_error():
    needed = needs(AttentionFeature.SPLIT_SEQUENCE, AttentionFeature.SAVED_SCORES)
    with pytest.raises(
        UsageError, match=r"no kernel can compute .* blockwise does not support remat policies"
    ):
        rank_kernels("auto", needed, device=TPU, length=SHORT)


def test_reference_supports_whole_sequences_on_every_platform():
    assert {*AttentionFeature} - KERNEL_SPECS["reference"].features == {
        AttentionFeature.SPLIT_SEQUENCE
    }
    assert not KERNEL_SPECS["reference"].platforms


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_estimates_assume_an_accelerator_without_a_kernel(length: int):
    names = [
        [choice.name for choice in rank_kernels("auto", LLAMA, device=device, length=length)]
        for device in (ANY_ACCELERATOR, ROCM)
    ]
    assert names[0] == names[1]


def test_unknown_compute_capability_has_the_smaller_limit():
    wide = dataclasses.replace(LLAMA, head_dim=256)
    assert [*unmet_needs(KERNEL_SPECS["cudnn"], wide, DeviceKind("cuda"))]
    assert not [*unmet_needs(KERNEL_SPECS["cudnn"], wide, DeviceKind("cuda", (10, 0)))]


def test_policy_that_saves_scores_needs_a_kernel_with_scores():
    with pytest.raises(PrepError) as caught:
        check_saved_scores("dots_saveable", "blockwise")
    assert (caught.value.code, str(caught.value)) == (
        USAGE,
        '`model.remat_policy` is "dots_saveable", and `model.attention_kernel` "blockwise" - '
        'the policy saves the scores of all tiles - `model.remat_policy = "nothing_saveable"`',
    )
    for policy, kernel in (
        ("dots_saveable", "reference"),
        ("dots_saveable", "auto"),
        (("q",), "blockwise"),
    ):
        check_saved_scores(policy, kernel)


def build(config: dict[str, Any]) -> ModelSpec:
    """Build a model from a tiny config."""
    family = family_of(config)
    return build_model(family, config, family.is_tied(config))


def features_of(name: str, **changes: Any) -> set[AttentionFeature]:
    """Return the features that a tiny model needs."""
    model = build(GOLDEN[name] | changes)
    return {*required_attention_features(model.arch_config, model.leaves)}


GROUPED = {AttentionFeature.CAUSAL, AttentionFeature.GROUPED_HEADS}
ENCODER = {
    AttentionFeature.BIDIRECTIONAL,
    AttentionFeature.CROSS,
    AttentionFeature.KEY_PADDING,
    AttentionFeature.SCORE_BIAS,
}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama-biases", {}, GROUPED),
        ("llama-biases", {"num_key_value_heads": 2}, {AttentionFeature.CAUSAL}),
        ("mistral", {"sliding_window": 8}, GROUPED | {AttentionFeature.WINDOW}),
        (
            "gpt_neo",
            {},
            {AttentionFeature.CAUSAL, AttentionFeature.WINDOW, AttentionFeature.MIXED_WINDOWS},
        ),
        (
            "gemma2",
            {},
            GROUPED
            | {AttentionFeature.WINDOW, AttentionFeature.MIXED_WINDOWS, AttentionFeature.SOFTCAP},
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            {AttentionFeature.CAUSAL, AttentionFeature.LAYER_SCALE},
        ),
        ("t5", {}, {AttentionFeature.CAUSAL} | ENCODER),
    ],
)
def test_model_features_follow_the_config(
    name: str, changes: dict[str, Any], expected: set[AttentionFeature]
):
    assert features_of(name, **changes) == expected


def test_run_features_are_saved_scores_and_split_sequences():
    assert run_features(remat_policy="nothing_saveable", num_sequence_shards=1) == set()
    assert all(
        run_features(remat_policy=policy, num_sequence_shards=1) == {AttentionFeature.SAVED_SCORES}
        for policy in SAVES_SCORES
    )
    assert run_features(remat_policy="none", num_sequence_shards=2) == {
        AttentionFeature.SPLIT_SEQUENCE
    }


@pytest.mark.parametrize(
    ("feature", "what"),
    [
        (AttentionFeature.SPLIT_SEQUENCE, "sequences split over sp are not supported"),
        (AttentionFeature.FCM, "forgetful causal masking is not supported"),
    ],
)
def test_check_mixer_rejects_split_sequences_and_hidden_keys(feature: AttentionFeature, what: str):
    features = frozenset({feature})
    check_mixer(build(GOLDEN["llama"]).arch_config, features)
    check_mixer(build(GOLDEN["lfm2"]).arch_config, frozenset({AttentionFeature.SEGMENTS}))
    with pytest.raises(PrepError, match=what):
        check_mixer(build(GOLDEN["lfm2"]).arch_config, features)


PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "attention.md"


def head_widths(spec: KernelSpec) -> str:
    """Return the supported head widths as text."""
    if spec.max_head_dim is None:
        return "any"
    widths = f"multiples of {spec.head_multiple} up to {spec.max_head_dim}"
    return f"{widths} ({spec.hopper_max_head_dim} on Hopper and later)"


def table_lines() -> Iterator[str]:
    """Yield the lines of the table."""
    specs = KERNEL_SPECS.values()
    rows = {
        "": [f"`{spec.name}`" for spec in specs],
        "---": ["---"] * len(specs),
        "platforms": [", ".join(spec.platforms) or "all" for spec in specs],
        "dtypes": [", ".join(spec.dtypes) for spec in specs],
        "head widths": [head_widths(spec) for spec in specs],
        **{
            str(feature): ["yes" if feature in spec.features else "" for spec in specs]
            for feature in AttentionFeature
        },
    }
    yield from (f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())


def test_table_of_kernels_is_current():
    assert "\n".join(table_lines()) in PAGE.read_text()


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "expected"),
    [
        (1, 2, 8, 1),  # a decode step: no expert has more rows than there are tokens
        (9, 2, 8, 9),
        (64, 8, 128, 16),
        (2048, 2, 8, 128),
        (2047, 2, 8, 64),
        (8192, 8, 128, 128),
        (1 << 20, 2, 8, 512),
    ],
)
def test_block_has_a_quarter_of_the_mean_rows(
    num_tokens: int, top_k: int, num_experts: int, expected: int
):
    assert expert_block_length(num_tokens, top_k, num_experts) == expected


KNOWN = "known: q, k, v, attention_output, o, mlp_hidden, mlp_output"
ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "misspelled activation": (
        ("q", "atention_output"),
        {},
        f"unknown activation 'atention_output' in `model.remat_policy` - {KNOWN} - did you mean `attention_output`?",
    ),
    "input of the layer": (
        ("layer_input",),
        {},
        f"unknown activation 'layer_input' in `model.remat_policy` - {KNOWN}",
    ),
    "hidden units of chunks": (
        ("q", "mlp_hidden"),
        {"ffn_chunk_size": 1024},
        '`model.remat_policy` is ["q", "mlp_hidden"], and `model.ffn_chunk_size` 1024 - '
        "mlp_hidden exists for one chunk of tokens at a time - `model.ffn_chunk_size = -1`",
    ),
    "offload without rematerialization": (
        "none",
        {"offload": "residuals"},
        '`model.offload` is "residuals", and `model.remat_policy` "none" - '
        'it goes with nothing_saveable or a list of activations - `model.remat_policy = "nothing_saveable"`',
    ),
    "offload with saved products": (
        "dots_saveable",
        {"offload": "residuals"},
        '`model.offload` is "residuals", and `model.remat_policy` "dots_saveable" - '
        'it goes with nothing_saveable or a list of activations - `model.remat_policy = "nothing_saveable"`',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_check_remat_rejects_conflicts(name: str):
    policy, options, message = ERRORS[name]
    with pytest.raises(PrepError) as caught:
        check_remat(policy, **options)
    assert (str(caught.value), caught.value.code) == (message, USAGE)


@pytest.mark.parametrize("policy", [REMAT_NONE, *REMAT_POLICIES, ACTIVATION_NAMES])
def test_check_remat_accepts_known_policies(policy: str | tuple[str, ...]):
    check_remat(policy)


@pytest.mark.parametrize("policy", ["nothing_saveable", ("q", "k", "v", "attention_output")])
def test_check_remat_accepts_offload(policy: str | tuple[str, ...]):
    check_remat(policy, "residuals", ffn_chunk_size=512)


def test_saved_activations_follow_the_policy():
    assert saved_activations(("q", "o"), has_experts=False) == {"q", "o"}
    assert saved_activations("nothing_saveable", has_experts=False) == frozenset()
    assert saved_activations("dots_saveable", has_experts=False) == {*ACTIVATION_NAMES}
    weights = saved_activations("dots_with_no_batch_dims_saveable", has_experts=True)
    assert weights == {"q", "k", "v", "o"}
