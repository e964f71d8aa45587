"""Every tensor of a source has its rows, a named rule that drops it, or a line in one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prepcli.errors import PrepError
from prepcli.planning.accounting import KEEP_ALL, Account, Shaped, Wishes, account, names_of, vocab_tensors
from prepcli.planning.plan import Same
from tests.helpers.models import GPT2, GPT_NEO, LLAMA, tensors_of
from trainer.models.parameters import rows
from trainer.models.registry import family_of

Tensors = dict[str, Shaped]
TIED = GPT_NEO
UNTIED = GPT_NEO | {"tie_word_embeddings": False}
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def stored(config: Mapping[str, Any], head: bool | None = None) -> Tensors:
    """The tensors of a file by their full names; `head` says whether it holds one, whatever the config says."""
    family = family_of(config)
    with_head = not family.tied(config) if head is None else head
    arrays = tensors_of(dict(config), "float32", not with_head, legacy=False)
    return {name: Shaped("float32", a.shape, a.nbytes) for name, a in arrays.items()}


def counted(config: Mapping[str, Any], tensors: Tensors, wishes: Wishes = KEEP_ALL, scan: bool = True) -> Account:
    family = family_of(config)
    names = names_of(family, config, tensors)
    bare = {names.bare(name): tensor for name, tensor in tensors.items()}
    return account(names, config, family.sizes(config), rows(family, config, scan), bare, wishes, "the model")


def refused(config: Mapping[str, Any], tensors: Tensors, wishes: Wishes = KEEP_ALL) -> PrepError:
    with pytest.raises(PrepError) as caught:
        counted(config, tensors, wishes)
    return caught.value


@pytest.mark.parametrize("config", [TIED, UNTIED, GPT2, LLAMA, LLAMA | {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("scan", [True, False])
def test_all_tensors_of_a_model_have_a_use(config: dict[str, Any], scan: bool):
    tensors = stored(config)
    found = counted(config, tensors, scan=scan)
    names = names_of(family_of(config), config, tensors)
    assert {names.full(name) for name in found.uses} == set(tensors)
    assert not found.dropped
    assert not found.checks
    paths = {use.path for uses in found.uses.values() for use in uses}
    assert ("layers.attn.q.weight" in paths) == scan == ("layers.2.attn.q.weight" not in paths)
    wanted = {"q", "k", "v"} if config is GPT2 else {"q"}
    kind = "c_attn.weight" if config is GPT2 else "q_proj.weight"
    uses = found.uses[names.bare(next(n for n in tensors if ".2." in n and kind in n))]
    assert {use.path for use in uses} == {f"layers.{'' if scan else '2.'}attn.{each}.weight" for each in wanted}
    assert {use.at for use in uses} == {(("layers", 2),)}


@pytest.mark.parametrize("config", [TIED, GPT2, LLAMA])
def test_names_without_the_base_prefix_are_the_same_model(config: dict[str, Any]):
    family, tensors = family_of(config), stored(config)
    bare = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    assert not names_of(family, config, bare).prefixed
    assert counted(config, bare).uses == counted(config, tensors).uses


def test_names_that_have_the_prefix_here_and_lack_it_there_are_one_model():
    tensors = stored(TIED)
    mixed = {
        name.removeprefix("transformer.") if i % 2 else name: tensor for i, (name, tensor) in enumerate(tensors.items())
    }
    assert counted(TIED, mixed).uses == counted(TIED, tensors).uses


@pytest.mark.parametrize(
    ("name", "bare"), [("wte.weight", "wte.weight"), ("transformer.lm_head.weight", "lm_head.weight")]
)
def test_a_tensor_with_and_without_the_prefix_is_refused(name: str, bare: str):
    tensors = stored(UNTIED)
    with pytest.raises(PrepError, match="twice, with and without") as caught:
        names_of(family_of(UNTIED), UNTIED, [*tensors, name])
    assert caught.value.why == f"transformer.{bare} and {bare}"


# What does not add up


def test_all_faults_are_named_at_once():
    tensors = stored(LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.q_proj.weight"] = Shaped("float32", (16, 32), 2048)
    tensors["model.layers.2.mlp.up_proj.weight"] = Shaped("float32", (32, 48), 6144)
    tensors["model.surprise"] = Shaped("float32", (), 4)
    tensors["lm_head.bias"] = Shaped("float32", (131,), 524)
    error = refused(LLAMA, tensors)
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
    tensors = stored(TIED)
    gone = [f"transformer.h.{i}.ln_1.bias" for i in range(count)]
    for name in gone:
        del tensors[name]
    error = refused(TIED, tensors)
    assert error.what == ("1 tensor of the model is missing" if count == 1 else "2 tensors of the model are missing")
    assert error.why == ", ".join(f"{name} [32]" for name in gone)


def test_errors_list_twenty_tensors_and_count_the_rest():
    extra = {f"surprise.{n}": Shaped("float32", (3,), 12) for n in range(2000)}
    error = refused(TIED, stored(TIED) | extra)
    assert error.what.startswith("2,000 tensors of the model")
    assert error.why.endswith("surprise.19 [3] and 1,980 more")


@pytest.mark.parametrize("shape", [(), (32, 1), (0, 32), (31,), (131, 32, 1)])
def test_a_tensor_of_another_shape_is_named_with_both(shape: tuple[int, ...]):
    tensors = stored(TIED) | {"transformer.ln_f.weight": Shaped("float32", shape, 0)}
    error = refused(TIED, tensors)
    assert "not as config.json says" in error.what
    assert error.why == f"transformer.ln_f.weight has shape {list(shape)}, expected [32] (embed 32)"


def test_messages_call_tensors_as_the_file_does():
    tensors = stored(TIED)
    tensors["h.1.ln_1.bias"] = Shaped("float32", (3,), 12)
    del tensors["transformer.h.1.ln_1.bias"], tensors["transformer.h.2.ln_1.bias"]
    assert refused(TIED, tensors).why.startswith(
        "missing: transformer.h.2.ln_1.bias [32]; misshapen: h.1.ln_1.bias has"
    )


def test_what_has_no_place_comes_with_the_way_to_lose_it():
    tensors = stored(TIED) | {"transformer.h.1.extra.weight": Shaped("float32", (3,), 12)}
    error = refused(TIED, tensors)
    assert error.what == "1 tensor of the model has no place in family gpt_neo"
    assert error.hint == "if they may be lost: `--drop 'transformer.h.*.extra.weight'`"
    for pattern in ("transformer.h.*.extra.weight", "h.*.extra.weight", "*extra*"):
        found = counted(TIED, tensors, Wishes(drop=(pattern,)))
        assert [(d.name, d.nbytes, d.rule) for d in found.dropped] == [("h.1.extra.weight", 12, "--drop")]


def test_a_tensor_that_has_a_place_is_not_dropped():
    tensors = {**stored(TIED), "extra": Shaped("float32", (3,), 12)}
    found = counted(TIED, tensors, Wishes(drop=("*",)))
    assert [(d.name, d.rule) for d in found.dropped] == [("extra", "--drop")]
    assert found.uses == counted(TIED, stored(TIED)).uses
    with pytest.raises(PrepError, match="drops nothing"):
        counted(TIED, stored(TIED), Wishes(drop=("*",)))


def test_more_layers_than_config_says_are_without_a_place():
    tensors = stored(TIED)
    for name in [name for name in tensors if ".2." in name]:
        tensors[name.replace(".2.", ".3.")] = tensors[name]
    error = refused(TIED, tensors)
    assert error.what == "13 tensors of the model have no place in family gpt_neo"


# Buffers of old files

MASK = Shaped("bool", (1, 1, 64, 64), 4096)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TIED, "transformer.h.0.attn.attention.bias"),
        (TIED, "transformer.h.2.attn.attention.masked_bias"),
        (LLAMA, "model.layers.1.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_buffers_are_dropped_by_their_rules(config: dict[str, Any], name: str):
    (dropped,) = counted(config, stored(config) | {name: MASK}).dropped
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
    assert name in refused(config, stored(config) | {name: MASK}).why


def test_parameters_whose_names_look_like_buffers_are_kept():
    found = counted(TIED, stored(TIED))
    assert {"h.0.attn.attention.out_proj.bias", "h.0.mlp.c_proj.bias", "h.0.ln_1.bias"} <= set(found.uses)


# Tied weights: what the config says, what the file holds, what comes of it


def test_tied_with_the_embedding_alone():
    found = counted(TIED, stored(TIED))
    assert (found.tied, found.checks, found.dropped) == (True, (), ())
    assert vocab_tensors(found) == {"wte.weight"}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("config", [TIED, GPT2, LLAMA | {"tie_word_embeddings": True}])
def test_tied_with_the_head_alone(config: dict[str, Any], bare: bool):
    family, tensors = family_of(config), stored(config, head=True)
    del tensors[family.prefix + family.tie.embedding]
    if bare:
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    found = counted(config, tensors)
    assert (found.tied, found.checks, found.dropped) == (True, (), ())
    assert found == counted(config, stored(config))
    assert found == counted(config, tensors, Wishes(untie=True))


def test_tied_with_both_holds_them_to_be_equal():
    tensors = stored(TIED, head=True)
    found = counted(TIED, tensors)
    assert (found.tied, found.checks) == (True, (Same("lm_head.weight", "wte.weight"),))
    assert [(d.name, d.rule) for d in found.dropped] == [("lm_head.weight", "equal to wte.weight")]
    assert vocab_tensors(found) == {"wte.weight", "lm_head.weight"}


def test_tied_with_both_and_untie_keeps_both():
    found = counted(TIED, stored(TIED, head=True), Wishes(untie=True))
    assert (found.tied, found.checks, found.dropped) == (False, (), ())
    assert vocab_tensors(found) == {"wte.weight", "lm_head.weight"}


@pytest.mark.parametrize("other", [Shaped("bfloat16", (131, 32), 8384), Shaped("float32", (136, 32), 17408)])
def test_tied_with_both_unlike_at_a_glance(other: Shaped):
    error = refused(TIED, stored(TIED, head=True) | {HEAD: other})
    assert error.what == f"{HEAD} is not equal to {EMBEDDING}"
    assert f"{other.dtype} {list(other.shape)} and float32 [131, 32]" in error.why
    assert "--untie" in error.hint


def test_tied_with_neither():
    tensors = stored(TIED)
    del tensors[EMBEDDING]
    assert refused(TIED, tensors).why == f"{EMBEDDING} [131, 32]"


def test_untied_with_both_is_two_leaves():
    found = counted(UNTIED, stored(UNTIED))
    assert (found.tied, found.checks) == (False, ())
    assert {found.uses[name][0].path for name in ("wte.weight", "lm_head.weight")} == {"embed.tokens", "head.weight"}


@pytest.mark.parametrize("gone", [HEAD, EMBEDDING])
def test_untied_with_one_of_both_is_an_error(gone: str):
    tensors = stored(UNTIED)
    del tensors[gone]
    assert refused(UNTIED, tensors).why == f"{gone} [131, 32]"
