"""Matching: every tensor is used, dropped by a named rule, or listed in one error. Vocabulary sizes of configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import FAILED, USAGE, PrepError
from prepcli.core.json_values import JsonValue
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import family_of
from prepcli.planning.plan import EqualityCheck
from prepcli.sources.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    MatchOptions,
    TensorInfo,
    TensorMatch,
    Vocabulary,
    detect_names,
    match_tensors,
    read_vocabulary,
    vocab_tensors,
    with_vocabulary,
)
from tests.helpers.tiny_checkpoints import GPT2, GPT_NEO, LLAMA, checkpoint_tensors


@pytest.mark.parametrize(
    ("config", "true", "expected"),
    [
        ({}, None, (50, 50)),  # the family's default
        ({"vocab_size": 131}, None, (131, 131)),
        ({"vocab_size": 136, "true_vocab_size": 131}, None, (131, 136)),
        ({"vocab_size": 136}, 131, (131, 136)),  # padded without a record of the true size
        ({"vocab_size": 136, "true_vocab_size": 133}, 131, (131, 136)),
        ({"vocab_size": 136}, 136, (136, 136)),
        ({"vocab_size": 1}, 1, (1, 1)),
        ({"true_vocab_size": 49}, None, (49, 50)),
    ],
)
def test_read_vocabulary_reads_config_and_option(
    config: dict[str, Any], true: int | None, expected: tuple[int, int]
):
    vocabulary = read_vocabulary(config, 50, true_size=true)
    assert (vocabulary.true_size, vocabulary.stored_size) == expected


@pytest.mark.parametrize("value", [0, -5, 3.0, "131", True, [131]])
@pytest.mark.parametrize("key", ["vocab_size", "true_vocab_size"])
def test_read_vocabulary_rejects_invalid_sizes(key: str, value: JsonValue):
    with pytest.raises(PrepError, match="is invalid") as raised:
        read_vocabulary({key: value}, 50)
    assert key in raised.value.why
    assert raised.value.code == FAILED


@pytest.mark.parametrize("true", [0, -1, 137])
def test_read_vocabulary_rejects_true_size_out_of_range(true: int):
    with pytest.raises(PrepError, match=f"true_vocab={true}` is out of range") as raised:
        read_vocabulary({"vocab_size": 136}, 50, true_size=true)
    assert "136 rows" in raised.value.why
    assert raised.value.code == USAGE


def test_read_vocabulary_rejects_true_above_stored():
    with pytest.raises(PrepError, match="true_vocab_size 137 is out of range") as raised:
        read_vocabulary({"vocab_size": 136, "true_vocab_size": 137}, 50)
    assert raised.value.code == FAILED


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_padded_size_starts_from_true_size(true: int, multiple: int):
    padded = Vocabulary(true, true + 7).padded_size(multiple)
    assert padded % multiple == 0
    assert 0 <= padded - true < multiple


def test_padded_size_ignores_earlier_padding():
    first = Vocabulary(131, 131).padded_size(8)
    assert Vocabulary(131, first).padded_size(128) == Vocabulary(131, 131).padded_size(128) == 256


@given(st.integers(1, 500), st.integers(0, 50))
def test_with_vocabulary_round_trips_both_sizes(true: int, added: int):
    config = {"vocab_size": 7, "true_vocab_size": 5, "hidden_size": 3}
    vocabulary = Vocabulary(true, true + added)
    padded = with_vocabulary(config, vocabulary)
    assert read_vocabulary(padded, 1) == vocabulary
    assert ("true_vocab_size" in padded) == bool(added)
    assert with_vocabulary(padded, Vocabulary(true, true)) == {"vocab_size": true, "hidden_size": 3}
    assert config == {"vocab_size": 7, "true_vocab_size": 5, "hidden_size": 3}


Tensors = dict[str, TensorInfo]
TIED = GPT_NEO
UNTIED = GPT_NEO | {"tie_word_embeddings": False}
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def stored_tensors(config: Mapping[str, Any], has_head: bool | None = None) -> Tensors:
    """Return a model's tensors by full name, with a head if `has_head`. None follows the config."""
    family = family_of(config)
    with_head = not family.is_tied(config) if has_head is None else has_head
    arrays = checkpoint_tensors(dict(config), "float32", not with_head, legacy=False)
    return {name: TensorInfo("float32", a.shape, a.nbytes) for name, a in arrays.items()}


def match_model(
    config: Mapping[str, Any],
    tensors: Tensors,
    options: MatchOptions = DEFAULT_MATCH_OPTIONS,
    scan: bool = True,
) -> TensorMatch:
    family = family_of(config)
    names = detect_names(family, config, full_names=tensors)
    bare = {names.bare_name(name): tensor for name, tensor in tensors.items()}
    return match_tensors(
        names,
        config,
        sizes=family.sizes(config),
        rows=parameter_rows(family, config, scan),
        tensors=bare,
        options=options,
        source_name="the model",
    )


def match_model_error(
    config: Mapping[str, Any], tensors: Tensors, options: MatchOptions = DEFAULT_MATCH_OPTIONS
) -> PrepError:
    with pytest.raises(PrepError) as raised:
        match_model(config, tensors, options)
    return raised.value


def test_name_in_a_message_has_no_unprintable_characters():
    names = detect_names(family_of(GPT_NEO), GPT_NEO, full_names=stored_tensors(GPT_NEO))
    assert names.display_name("été\x1b[2J") == r"transformer.\xe9t\xe9\x1b[2J"
    assert names.display_name("été") == "transformer.été"


@pytest.mark.parametrize(
    "config", [TIED, UNTIED, GPT2, LLAMA, LLAMA | {"attention_bias": True, "mlp_bias": True}]
)
@pytest.mark.parametrize("scan", [True, False])
def test_match_uses_every_tensor_of_a_model(config: dict[str, Any], scan: bool):
    tensors = stored_tensors(config)
    accounting = match_model(config, tensors, scan=scan)
    names = detect_names(family_of(config), config, full_names=tensors)
    assert {names.full_name(name) for name in accounting.uses} == set(tensors)
    assert not accounting.dropped
    assert not accounting.checks
    paths = {use.path for uses in accounting.uses.values() for use in uses}
    assert ("layers.attn.q.weight" in paths) == scan == ("layers.2.attn.q.weight" not in paths)
    wanted = {"q", "k", "v"} if config is GPT2 else {"q"}
    kind = "c_attn.weight" if config is GPT2 else "q_proj.weight"
    uses = accounting.uses[names.bare_name(next(n for n in tensors if ".2." in n and kind in n))]
    assert {use.path for use in uses} == {
        f"layers.{'' if scan else '2.'}attn.{projection}.weight" for projection in wanted
    }
    assert {use.stacked_indices for use in uses} == {(("layers", 2),)}


@pytest.mark.parametrize("config", [TIED, GPT2, LLAMA])
def test_match_accepts_names_without_base_prefix(config: dict[str, Any]):
    family, tensors = family_of(config), stored_tensors(config)
    bare = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    assert not detect_names(family, config, full_names=bare).is_prefixed
    assert match_model(config, bare).uses == match_model(config, tensors).uses


def test_match_accepts_names_with_and_without_prefix():
    tensors = stored_tensors(TIED)
    mixed = {
        name.removeprefix("transformer.") if i % 2 else name: tensor
        for i, (name, tensor) in enumerate(tensors.items())
    }
    assert match_model(TIED, mixed).uses == match_model(TIED, tensors).uses


@pytest.mark.parametrize(
    ("name", "bare"),
    [("wte.weight", "wte.weight"), ("transformer.lm_head.weight", "lm_head.weight")],
)
def test_detect_names_rejects_tensor_stored_twice(name: str, bare: str):
    tensors = stored_tensors(UNTIED)
    with pytest.raises(PrepError, match="twice, with and without") as raised:
        detect_names(family_of(UNTIED), UNTIED, full_names=[*tensors, name])
    assert raised.value.why == f"transformer.{bare} and {bare}"


# Mismatches


def test_match_error_lists_all_kinds_of_mismatch():
    tensors = stored_tensors(LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.q_proj.weight"] = TensorInfo("float32", (16, 32), 2048)
    tensors["model.layers.2.mlp.up_proj.weight"] = TensorInfo("float32", (32, 48), 6144)
    tensors["model.surprise"] = TensorInfo("float32", (), 4)
    tensors["lm_head.bias"] = TensorInfo("float32", (131,), 524)
    error = match_model_error(LLAMA, tensors)
    assert error.what == "the model does not match family llama"
    for text in (
        "missing: model.layers.0.mlp.up_proj.weight [48, 32], model.norm.weight [32]",
        "unexpected: model.surprise [], lm_head.bias [131]",
        "model.layers.1.self_attn.q_proj.weight has shape [16, 32], expected [32, 32] (heads 8 head_dim 4 x embed 32)",
        "model.layers.2.mlp.up_proj.weight has shape [32, 48], expected [48, 32] (mlp 48 x embed 32)",
    ):
        assert text in error.why
    assert "the same model" in error.hint


@pytest.mark.parametrize("count", [1, 2])
def test_match_error_counts_missing_tensors(count: int):
    tensors = stored_tensors(TIED)
    missing_names = [f"transformer.h.{i}.ln_1.bias" for i in range(count)]
    for name in missing_names:
        del tensors[name]
    error = match_model_error(TIED, tensors)
    assert error.what == (
        "1 tensor of the model is missing" if count == 1 else "2 tensors of the model are missing"
    )
    assert error.why == ", ".join(f"{name} [32]" for name in missing_names)


def test_match_error_lists_at_most_twenty_tensors():
    extra = {f"surprise.{n}": TensorInfo("float32", (3,), 12) for n in range(2000)}
    error = match_model_error(TIED, stored_tensors(TIED) | extra)
    assert error.what.startswith("2,000 tensors of the model")
    assert error.why.endswith("surprise.19 [3] and 1,980 more")


@pytest.mark.parametrize("shape", [(), (32, 1), (0, 32), (31,), (131, 32, 1)])
def test_match_error_shows_stored_and_expected_shape(shape: tuple[int, ...]):
    tensors = stored_tensors(TIED) | {"transformer.ln_f.weight": TensorInfo("float32", shape, 0)}
    error = match_model_error(TIED, tensors)
    assert "does not match config.json" in error.what
    assert error.why == f"transformer.ln_f.weight has shape {list(shape)}, expected [32] (embed 32)"


def test_match_error_spells_names_as_the_source_does():
    tensors = stored_tensors(TIED)
    tensors["h.1.ln_1.bias"] = TensorInfo("float32", (3,), 12)
    del tensors["transformer.h.1.ln_1.bias"], tensors["transformer.h.2.ln_1.bias"]
    assert match_model_error(TIED, tensors).why.startswith(
        "missing: transformer.h.2.ln_1.bias [32]; wrong shape: h.1.ln_1.bias has"
    )


def test_match_error_suggests_drop_for_unexpected():
    tensors = stored_tensors(TIED) | {
        "transformer.h.1.extra.weight": TensorInfo("float32", (3,), 12)
    }
    error = match_model_error(TIED, tensors)
    assert error.what == "1 tensor of the model is not part of family gpt_neo"
    hint = "`prep save-init --drop 'transformer.h.*.extra.weight'` converts without them"
    assert error.hint == hint
    with pytest.raises(PrepError) as raised:
        match_model(TIED, tensors, MatchOptions(offers_drop=True))
    assert raised.value.hint == "`--drop 'transformer.h.*.extra.weight'` ignores them"


def test_match_rejects_more_layers_than_config():
    tensors = stored_tensors(TIED)
    for name in [name for name in tensors if ".2." in name]:
        tensors[name.replace(".2.", ".3.")] = tensors[name]
    error = match_model_error(TIED, tensors)
    assert error.what == "13 tensors of the model are not part of family gpt_neo"


# Buffers in files of old library versions

MASK = TensorInfo("bool", (1, 1, 64, 64), 4096)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TIED, "transformer.h.0.attn.attention.bias"),
        (TIED, "transformer.h.2.attn.attention.masked_bias"),
        (LLAMA, "model.layers.1.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_match_drops_known_buffers_by_rule(config: dict[str, Any], name: str):
    (dropped,) = match_model(config, stored_tensors(config) | {name: MASK}).dropped
    family = family_of(config)
    assert dropped.name == name.removeprefix(family.prefix)
    assert dropped.rule in family.dropped.values()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TIED, "transformer.h.0.attn.attention.biases"),
        (TIED, "transformer.h.0.attn.attention.out_proj.attn.attention.bias"),
        (TIED, "transformer.h.x.attn.attention.bias"),
        (TIED, "transformer.h.0.1.attn.attention.bias"),
        (TIED, "transformer.h.0xattn.attention.bias"),
        (TIED, "transformer.other.h.0.attn.attention.bias"),
        (LLAMA, "model.layers.1.self_attn.rotary_emb.inv_freq.scale"),
        (LLAMA, "model.rotary_emb.inv_freq"),
    ],
)
def test_drop_rules_match_whole_names_only(config: dict[str, Any], name: str):
    assert name in match_model_error(config, stored_tensors(config) | {name: MASK}).why


def test_match_keeps_parameters_named_like_buffers():
    accounting = match_model(TIED, stored_tensors(TIED))
    assert {"h.0.attn.attention.out_proj.bias", "h.0.mlp.c_proj.bias", "h.0.ln_1.bias"} <= set(
        accounting.uses
    )


# Tied weights: each combination of config and stored tensors


def test_tied_model_with_embedding_only_needs_no_check():
    accounting = match_model(TIED, stored_tensors(TIED))
    assert (accounting.is_tied, accounting.checks, accounting.dropped) == (True, (), ())
    assert vocab_tensors(accounting) == {"wte.weight"}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("config", [TIED, GPT2, LLAMA | {"tie_word_embeddings": True}])
def test_tied_model_with_head_only_equals_embedding_only(config: dict[str, Any], bare: bool):
    family, tensors = family_of(config), stored_tensors(config, has_head=True)
    del tensors[family.prefix + family.tying.embedding_tensor]
    if bare:
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    accounting = match_model(config, tensors)
    assert (accounting.is_tied, accounting.checks, accounting.dropped) == (True, (), ())
    assert accounting == match_model(config, stored_tensors(config))
    assert accounting == match_model(config, tensors, MatchOptions(untie=True))


def test_tied_model_with_both_checks_equality():
    tensors = stored_tensors(TIED, has_head=True)
    accounting = match_model(TIED, tensors)
    assert (accounting.is_tied, accounting.checks) == (
        True,
        (EqualityCheck("lm_head.weight", "wte.weight"),),
    )
    assert [(d.name, d.rule) for d in accounting.dropped] == [
        ("lm_head.weight", "equal to wte.weight")
    ]
    assert vocab_tensors(accounting) == {"wte.weight", "lm_head.weight"}


def test_tied_model_with_both_and_untie_keeps_both():
    accounting = match_model(TIED, stored_tensors(TIED, has_head=True), MatchOptions(untie=True))
    assert (accounting.is_tied, accounting.checks, accounting.dropped) == (False, (), ())
    assert vocab_tensors(accounting) == {"wte.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    "head", [TensorInfo("bfloat16", (131, 32), 8384), TensorInfo("float32", (136, 32), 17408)]
)
def test_tied_model_rejects_unequal_dtype_or_shape(head: TensorInfo):
    error = match_model_error(TIED, stored_tensors(TIED, has_head=True) | {HEAD: head})
    assert error.what == f"{HEAD} is not equal to {EMBEDDING}"
    assert f"{head.dtype} {list(head.shape)} and float32 [131, 32]" in error.why
    assert "--untie" in error.hint


def test_tied_model_with_neither_is_missing_embedding():
    tensors = stored_tensors(TIED)
    del tensors[EMBEDDING]
    assert match_model_error(TIED, tensors).why == f"{EMBEDDING} [131, 32]"


def test_untied_model_with_both_has_two_leaves():
    accounting = match_model(UNTIED, stored_tensors(UNTIED))
    assert (accounting.is_tied, accounting.checks) == (False, ())
    assert {accounting.uses[name][0].path for name in ("wte.weight", "lm_head.weight")} == {
        "embed.tokens",
        "head.weight",
    }


@pytest.mark.parametrize("missing_name", [HEAD, EMBEDDING])
def test_untied_model_rejects_one_missing(missing_name: str):
    tensors = stored_tensors(UNTIED)
    del tensors[missing_name]
    assert match_model_error(UNTIED, tensors).why == f"{missing_name} [131, 32]"
