"""The choice of an attention kernel from requirements and the kind of the devices, which are data here."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.models.activation_memory import NO_SCORES
from prepcli.models.attention_kernels import (
    ANY_ACCELERATOR,
    CPU,
    CPU_MAX_DENSE_LENGTH,
    KERNEL_NAMES,
    KERNEL_SPECS,
    MAX_DENSE_LENGTH,
    AttentionFeature,
    AttentionNeeds,
    DeviceKind,
    check_saved_scores,
    rank_kernels,
    unmet_needs,
)

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


def test_score_tile_is_the_tile_kept_in_memory():
    tiles = {name: KERNEL_SPECS[name].score_tile(512, 256) for name in KERNEL_NAMES}
    assert tiles == {
        "reference": None,
        "blockwise": (512, 256),
        "cudnn": NO_SCORES,
        "pallas-splash": NO_SCORES,
    }


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
