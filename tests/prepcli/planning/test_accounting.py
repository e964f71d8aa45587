"""Every tensor of a source has its rows, a named rule that drops it, or a line in one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prepcli.errors import PrepError
from prepcli.planning.accounting import (
    DEFAULT_MATCH_OPTIONS,
    Accounting,
    MatchOptions,
    TensorInfo,
    detect_names,
    match_tensors,
    vocab_tensors,
)
from prepcli.planning.plan import EqualityCheck
from tests.helpers.tiny_checkpoints import GPT2, GPT_NEO, LLAMA, checkpoint_tensors
from trainer.models.parameters import parameter_rows
from trainer.models.registry import family_of

Tensors = dict[str, TensorInfo]
TIED = GPT_NEO
UNTIED = GPT_NEO | {"tie_word_embeddings": False}
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def stored_tensors(config: Mapping[str, Any], head: bool | None = None) -> Tensors:
    """The tensors of a file by their full names; `head` says whether it holds one, whatever the config says."""
    family = family_of(config)
    with_head = not family.is_tied(config) if head is None else head
    arrays = checkpoint_tensors(dict(config), "float32", not with_head, legacy=False)
    return {name: TensorInfo("float32", a.shape, a.nbytes) for name, a in arrays.items()}


def match_model(
    config: Mapping[str, Any], tensors: Tensors, wishes: MatchOptions = DEFAULT_MATCH_OPTIONS, scan: bool = True
) -> Accounting:
    family = family_of(config)
    names = detect_names(family, config, tensors)
    bare = {names.bare_name(name): tensor for name, tensor in tensors.items()}
    return match_tensors(
        names, config, family.sizes(config), parameter_rows(family, config, scan), bare, wishes, "the model"
    )


def match_model_error(
    config: Mapping[str, Any], tensors: Tensors, wishes: MatchOptions = DEFAULT_MATCH_OPTIONS
) -> PrepError:
    with pytest.raises(PrepError) as caught:
        match_model(config, tensors, wishes)
    return caught.value


@pytest.mark.parametrize("config", [TIED, UNTIED, GPT2, LLAMA, LLAMA | {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("scan", [True, False])
def test_all_tensors_of_a_model_have_a_use(config: dict[str, Any], scan: bool):
    tensors = stored_tensors(config)
    found = match_model(config, tensors, scan=scan)
    names = detect_names(family_of(config), config, tensors)
    assert {names.full_name(name) for name in found.uses} == set(tensors)
    assert not found.dropped
    assert not found.checks
    paths = {use.path for uses in found.uses.values() for use in uses}
    assert ("layers.attn.q.weight" in paths) == scan == ("layers.2.attn.q.weight" not in paths)
    wanted = {"q", "k", "v"} if config is GPT2 else {"q"}
    kind = "c_attn.weight" if config is GPT2 else "q_proj.weight"
    uses = found.uses[names.bare_name(next(n for n in tensors if ".2." in n and kind in n))]
    assert {use.path for use in uses} == {f"layers.{'' if scan else '2.'}attn.{each}.weight" for each in wanted}
    assert {use.stacked_indices for use in uses} == {(("layers", 2),)}


@pytest.mark.parametrize("config", [TIED, GPT2, LLAMA])
def test_names_without_the_base_prefix_are_the_same_model(config: dict[str, Any]):
    family, tensors = family_of(config), stored_tensors(config)
    bare = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    assert not detect_names(family, config, bare).is_prefixed
    assert match_model(config, bare).uses == match_model(config, tensors).uses


def test_names_that_have_the_prefix_here_and_lack_it_there_are_one_model():
    tensors = stored_tensors(TIED)
    mixed = {
        name.removeprefix("transformer.") if i % 2 else name: tensor for i, (name, tensor) in enumerate(tensors.items())
    }
    assert match_model(TIED, mixed).uses == match_model(TIED, tensors).uses


@pytest.mark.parametrize(
    ("name", "bare"), [("wte.weight", "wte.weight"), ("transformer.lm_head.weight", "lm_head.weight")]
)
def test_a_tensor_with_and_without_the_prefix_is_refused(name: str, bare: str):
    tensors = stored_tensors(UNTIED)
    with pytest.raises(PrepError, match="twice, with and without") as caught:
        detect_names(family_of(UNTIED), UNTIED, [*tensors, name])
    assert caught.value.why == f"transformer.{bare} and {bare}"


# What does not add up


def test_all_faults_are_named_at_once():
    tensors = stored_tensors(LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.q_proj.weight"] = TensorInfo("float32", (16, 32), 2048)
    tensors["model.layers.2.mlp.up_proj.weight"] = TensorInfo("float32", (32, 48), 6144)
    tensors["model.surprise"] = TensorInfo("float32", (), 4)
    tensors["lm_head.bias"] = TensorInfo("float32", (131,), 524)
    error = match_model_error(LLAMA, tensors)
    assert error.what == "the model does not add up as family llama"
    for text in (
        "missing: model.layers.0.mlp.up_proj.weight [48, 32], model.norm.weight [32]",
        "without a place: model.surprise [], lm_head.bias [131]",
        "model.layers.1.self_attn.q_proj.weight has shape [16, 32], expected [32, 32] (heads 8 head_dim 4 x embed 32)",
        "model.layers.2.mlp.up_proj.weight has shape [32, 48], expected [48, 32] (mlp 48 x embed 32)",
    ):
        assert text in error.why
    assert "one model" in error.hint


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_missing_is_counted_and_listed(count: int):
    tensors = stored_tensors(TIED)
    gone = [f"transformer.h.{i}.ln_1.bias" for i in range(count)]
    for name in gone:
        del tensors[name]
    error = match_model_error(TIED, tensors)
    assert error.what == ("1 tensor of the model is missing" if count == 1 else "2 tensors of the model are missing")
    assert error.why == ", ".join(f"{name} [32]" for name in gone)


def test_errors_list_twenty_tensors_and_count_the_rest():
    extra = {f"surprise.{n}": TensorInfo("float32", (3,), 12) for n in range(2000)}
    error = match_model_error(TIED, stored_tensors(TIED) | extra)
    assert error.what.startswith("2,000 tensors of the model")
    assert error.why.endswith("surprise.19 [3] and 1,980 more")


@pytest.mark.parametrize("shape", [(), (32, 1), (0, 32), (31,), (131, 32, 1)])
def test_a_tensor_of_another_shape_is_named_with_both(shape: tuple[int, ...]):
    tensors = stored_tensors(TIED) | {"transformer.ln_f.weight": TensorInfo("float32", shape, 0)}
    error = match_model_error(TIED, tensors)
    assert "not as config.json says" in error.what
    assert error.why == f"transformer.ln_f.weight has shape {list(shape)}, expected [32] (embed 32)"


def test_messages_call_tensors_as_the_file_does():
    tensors = stored_tensors(TIED)
    tensors["h.1.ln_1.bias"] = TensorInfo("float32", (3,), 12)
    del tensors["transformer.h.1.ln_1.bias"], tensors["transformer.h.2.ln_1.bias"]
    assert match_model_error(TIED, tensors).why.startswith(
        "missing: transformer.h.2.ln_1.bias [32]; misshapen: h.1.ln_1.bias has"
    )


def test_what_has_no_place_comes_with_the_way_to_lose_it():
    tensors = stored_tensors(TIED) | {"transformer.h.1.extra.weight": TensorInfo("float32", (3,), 12)}
    error = match_model_error(TIED, tensors)
    assert error.what == "1 tensor of the model has no place in family gpt_neo"
    assert error.hint == "if they may be lost: `--drop 'transformer.h.*.extra.weight'`"
    for pattern in ("transformer.h.*.extra.weight", "h.*.extra.weight", "*extra*"):
        found = match_model(TIED, tensors, MatchOptions(drop=(pattern,)))
        assert [(d.name, d.nbytes, d.rule) for d in found.dropped] == [("h.1.extra.weight", 12, "--drop")]


def test_a_tensor_that_has_a_place_is_not_dropped():
    tensors = {**stored_tensors(TIED), "extra": TensorInfo("float32", (3,), 12)}
    found = match_model(TIED, tensors, MatchOptions(drop=("*",)))
    assert [(d.name, d.rule) for d in found.dropped] == [("extra", "--drop")]
    assert found.uses == match_model(TIED, stored_tensors(TIED)).uses
    with pytest.raises(PrepError, match="drops nothing"):
        match_model(TIED, stored_tensors(TIED), MatchOptions(drop=("*",)))


def test_more_layers_than_config_says_are_without_a_place():
    tensors = stored_tensors(TIED)
    for name in [name for name in tensors if ".2." in name]:
        tensors[name.replace(".2.", ".3.")] = tensors[name]
    error = match_model_error(TIED, tensors)
    assert error.what == "13 tensors of the model have no place in family gpt_neo"


# Buffers of old files

MASK = TensorInfo("bool", (1, 1, 64, 64), 4096)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TIED, "transformer.h.0.attn.attention.bias"),
        (TIED, "transformer.h.2.attn.attention.masked_bias"),
        (LLAMA, "model.layers.1.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_buffers_are_dropped_by_their_rules(config: dict[str, Any], name: str):
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
def test_rules_take_whole_names_only(config: dict[str, Any], name: str):
    assert name in match_model_error(config, stored_tensors(config) | {name: MASK}).why


def test_parameters_whose_names_look_like_buffers_are_kept():
    found = match_model(TIED, stored_tensors(TIED))
    assert {"h.0.attn.attention.out_proj.bias", "h.0.mlp.c_proj.bias", "h.0.ln_1.bias"} <= set(found.uses)


# Tied weights: what the config says, what the file holds, what comes of it


def test_tied_with_the_embedding_alone():
    found = match_model(TIED, stored_tensors(TIED))
    assert (found.is_tied, found.checks, found.dropped) == (True, (), ())
    assert vocab_tensors(found) == {"wte.weight"}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("config", [TIED, GPT2, LLAMA | {"tie_word_embeddings": True}])
def test_tied_with_the_head_alone(config: dict[str, Any], bare: bool):
    family, tensors = family_of(config), stored_tensors(config, head=True)
    del tensors[family.prefix + family.tying.embedding_tensor]
    if bare:
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    found = match_model(config, tensors)
    assert (found.is_tied, found.checks, found.dropped) == (True, (), ())
    assert found == match_model(config, stored_tensors(config))
    assert found == match_model(config, tensors, MatchOptions(untie=True))


def test_tied_with_both_holds_them_to_be_equal():
    tensors = stored_tensors(TIED, head=True)
    found = match_model(TIED, tensors)
    assert (found.is_tied, found.checks) == (True, (EqualityCheck("lm_head.weight", "wte.weight"),))
    assert [(d.name, d.rule) for d in found.dropped] == [("lm_head.weight", "equal to wte.weight")]
    assert vocab_tensors(found) == {"wte.weight", "lm_head.weight"}


def test_tied_with_both_and_untie_keeps_both():
    found = match_model(TIED, stored_tensors(TIED, head=True), MatchOptions(untie=True))
    assert (found.is_tied, found.checks, found.dropped) == (False, (), ())
    assert vocab_tensors(found) == {"wte.weight", "lm_head.weight"}


@pytest.mark.parametrize("other", [TensorInfo("bfloat16", (131, 32), 8384), TensorInfo("float32", (136, 32), 17408)])
def test_tied_with_both_unlike_at_a_glance(other: TensorInfo):
    error = match_model_error(TIED, stored_tensors(TIED, head=True) | {HEAD: other})
    assert error.what == f"{HEAD} is not equal to {EMBEDDING}"
    assert f"{other.dtype} {list(other.shape)} and float32 [131, 32]" in error.why
    assert "--untie" in error.hint


def test_tied_with_neither():
    tensors = stored_tensors(TIED)
    del tensors[EMBEDDING]
    assert match_model_error(TIED, tensors).why == f"{EMBEDDING} [131, 32]"


def test_untied_with_both_is_two_leaves():
    found = match_model(UNTIED, stored_tensors(UNTIED))
    assert (found.is_tied, found.checks) == (False, ())
    assert {found.uses[name][0].path for name in ("wte.weight", "lm_head.weight")} == {"embed.tokens", "head.weight"}


@pytest.mark.parametrize("gone", [HEAD, EMBEDDING])
def test_untied_with_one_of_both_is_an_error(gone: str):
    tensors = stored_tensors(UNTIED)
    del tensors[gone]
    assert match_model_error(UNTIED, tensors).why == f"{gone} [131, 32]"
