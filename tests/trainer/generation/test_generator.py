"""Generation: with what is kept, logits are those of whole sequences, and tokens those of transformers; on any mesh, in
any batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from tests.golden import make_decoders, make_greedy
from tests.helpers.tiny_configs import AMBIGUOUS, GOLDEN, T5
from tests.helpers.tiny_transformers import (
    TinyTransformer,
    model_logits,
    random_tensors,
    tiny_transformer,
    with_padded_vocab,
)
from tests.trainer.distributed.test_sharding import CONFIGS, shard_params
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.generation import decode, generator
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator
from trainer.generation.sampling import Sampling
from trainer.models.errors import USAGE, PrepError
from trainer.models.mesh import parse_mesh
from trainer.models.param_tree import Tree, flatten_tree
from trainer.models.registry import FAMILIES
from trainer.nn.attention_mask import KVCache
from trainer.nn.transformer import ForwardConfig

Rows = list[list[int]]
DRAWN = GenerationConfig(9, sampling=Sampling(1.3, top_k=20, top_p=0.95, seed=5))
PROMPTS: Rows = [[3, 1, 4, 1, 5], [9, 2]]
SMALL: dict[str, dict[str, Any]] = {
    **{
        name: {key: value for key, value in config.items() if key != "true_vocab_size"}
        for name, config in CONFIGS.items()
    },
    "t5": T5 | {"num_heads": 4, "num_decoder_layers": 2},
}
SOME = ("gpt_neo", "gemma3_text", "phi3-longrope", "llama-dynamic", "t5")  # of each kind of layers, and of rotations
SLOTS = make_greedy.LENGTHS[-1] + make_greedy.MAX_NEW_TOKENS - 1
SLOW = pytest.mark.slow


@cache
def golden_greedy() -> dict[str, dict[str, list[list[int]]]]:
    return json.loads(make_greedy.FILE.read_text())


def logits_by_step(made: TinyTransformer, params: Tree, batch: Mapping[str, Array], starts: Array) -> Array:
    """Of tokens [B, T], row b from slot `starts[b]` on, taken one by one: [T, B, V]."""
    tokens, model, how, memory = batch["tokens"], made.model, ForwardConfig(), None
    if "source" in batch:
        memory = decode.encode_sources(params, batch["source"], batch["present"], model, how)

    def step(kept: KVCache, new: Array) -> tuple[KVCache, Array]:
        logits, kept = decode.decode_step(params, kept, new[:, None], starts, model, how, memory)
        return kept, logits

    return lax.scan(step, decode.init_kv_cache(model, tokens.shape, how), tokens.T)[1]


@cache
def by_step(name: str) -> Callable[..., Array]:
    """`logits_by_step`, compiled once: batches are of one shape."""
    return jax.jit(partial(logits_by_step, tiny_transformer(GOLDEN[name])))


def laid_out(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that end in the last of SLOTS slots, one of padding where there are fewer, and where each begins."""
    rows = [*rows, *([0],) * (len(make_greedy.LENGTHS) - len(rows))]
    starts = np.array([SLOTS - len(row) for row in rows])
    return np.stack([np.pad(row, (start, 0)) for row, start in zip(rows, starts)]), starts


def sources_of(rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """What an encoder reads: rows that begin in the first of SLOTS slots."""
    tokens, starts = laid_out(rows)
    tokens = np.stack([np.roll(row, -start) for row, start in zip(tokens, starts)])
    return {"source": tokens, "present": np.arange(SLOTS) < SLOTS - starts[:, None]}


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_whole_sequences(name: str):
    """As transformers has them: rows of 7 and 4 tokens, which end in the same slot."""
    golden = make_decoders.load(name)
    rows = [row[:count].tolist() for row, count in zip(golden.short["tokens"], make_decoders.LENGTHS)]
    tokens, starts = laid_out(rows)
    batch = {"tokens": tokens}
    if "source" in golden.short:
        present = golden.short["present"].astype(bool)
        batch |= sources_of([row[own].tolist() for row, own in zip(golden.short["source"], present)])
    found = np.asarray(
        by_step(name)(tiny_transformer(golden.config).params_from_tensors(golden.tensors), batch, starts)
    )
    for row, count in enumerate(make_decoders.LENGTHS):
        assert abs(found[SLOTS - count :, row] - golden.short_logits[row, :count]).max() <= 2e-5


def test_logits_of_scores_by_depth_are_those_of_whole_sequences():
    config = AMBIGUOUS["gpt2-by-depth"]
    made, tensors = tiny_transformer(config), random_tensors(config)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (2, 6), dtype=np.int32)
    params = made.params_from_tensors(tensors)
    found = jax.jit(partial(logits_by_step, made))(params, {"tokens": tokens}, np.zeros(2, np.int32))
    wanted = model_logits(made.model, params, {"tokens": tokens})
    np.testing.assert_allclose(np.moveaxis(np.asarray(found), 0, 1), wanted, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "phi3-longrope"])  # it begins anew on its way
def test_each_token_of_transformers_is_the_likeliest(name: str):
    """After its prompt and the tokens before it."""
    config, tensors = make_greedy.greedy_model(name)
    made, golden = tiny_transformer(config), golden_greedy()[name]
    encodes = made.model.arch_config.encoder is not None
    begun = [[0]] * len(golden["prompts"]) if encodes else golden["prompts"]
    tokens, starts = laid_out([[*prompt, *new[:-1]] for prompt, new in zip(begun, golden["tokens"])])
    batch = {"tokens": tokens} | (sources_of(golden["prompts"]) if encodes else {})
    found = np.asarray(by_step(name)(made.params_from_tensors(tensors), batch, starts)).argmax(-1)
    assert found[-make_greedy.MAX_NEW_TOKENS :].T.tolist() == golden["tokens"]


def make_generator(
    made: TinyTransformer, params: Tree, asked: GenerationConfig, how: ForwardConfig | None = None
) -> Generator:
    return Generator(params, made.model, how or ForwardConfig(), asked)


def added(own: Generator, prompts: Rows, first_row: int = 0, size: int = 0) -> Rows:
    """What is added to prompts; of an encoder's model they are the sources, and the decoder begins with token 0."""
    if own.model.arch_config.encoder is None:
        return own.generate(prompts, first_row=first_row, min_rows=size)
    return own.generate([[0]] * len(prompts), prompts, first_row, size)


@pytest.mark.parametrize("name", [name if name in SOME else pytest.param(name, marks=SLOW) for name in GOLDEN])
def test_tokens_are_those_of_transformers(name: str):
    """Beyond what rotations that change with the length were made for, too."""
    config, tensors = make_greedy.greedy_model(name)
    made, golden = tiny_transformer(config), golden_greedy()[name]
    own = make_generator(made, made.params_from_tensors(tensors), GenerationConfig(make_greedy.MAX_NEW_TOKENS))
    assert added(own, golden["prompts"]) == golden["tokens"]


def test_there_are_tokens_of_each_config():
    golden = golden_greedy()
    assert {*golden} == {*GOLDEN}
    assert {str(config["model_type"]) for config in GOLDEN.values()} == {*FAMILIES}
    for entry in golden.values():
        assert [len(prompt) for prompt in entry["prompts"]] == [*make_greedy.LENGTHS]
        assert {len(tokens) for tokens in entry["tokens"]} == {make_greedy.MAX_NEW_TOKENS}


@pytest.mark.parametrize("name", GOLDEN)
def test_transformers_still_generates_the_same(name: str):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    entry = golden_greedy()[name]
    assert make_greedy.compute(name, entry["prompts"][:1]) == entry["tokens"][:1]


@cache
def drawn_alone(name: str) -> Rows:
    return added(small(name), PROMPTS)


def small(name: str, on: ShardingContext | None = None, asked: GenerationConfig = DRAWN, **form: Any) -> Generator:
    """A model whose dims a mesh divides; its vocabulary is padded with rows that would be drawn at once."""
    config = SMALL[name] | {"vocab_size": 29}
    config, tensors = with_padded_vocab(config, random_tensors(config), 3, 50.0)
    made = tiny_transformer(config, **form)
    params = made.params_from_tensors(tensors)
    on = on or ShardingContext()
    return make_generator(
        made,
        shard_params(made, params, on) if on.mesh else params,
        asked,
        ForwardConfig(scan_layers=made.model.has_stacked_layers, sharding=on),
    )


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=SLOW) for name in ("t5", "gpt_neo"))])
def test_tokens_are_the_same_on_a_mesh(name: str):
    on = make_sharding_context(parse_mesh("1,2,4"))
    assert added(small(name, on), PROMPTS) == drawn_alone(name)


@pytest.mark.parametrize("form", [{"scan": False}, pytest.param({"scan_axis": 1}, marks=SLOW)])
def test_tokens_are_the_same_in_any_form(form: dict[str, Any]):
    assert added(small("gpt_neo", **form), PROMPTS) == drawn_alone("gpt_neo")


def test_rows_of_padding_are_never_drawn():
    config = SMALL["gpt_neo"] | {"vocab_size": 29}
    made = tiny_transformer(config)
    plain = make_generator(made, made.params_from_tensors(random_tensors(config)), DRAWN)
    assert added(plain, PROMPTS) == drawn_alone("gpt_neo")
    assert max(map(max, drawn_alone("gpt_neo"))) < 29


def test_a_prompt_has_the_same_tokens_in_any_batch():
    own, wanted = small("llama"), drawn_alone("llama")
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    assert added(own, PROMPTS[1:], first_row=1) == wanted[1:]
    assert [added(own, [prompt], row, size=2)[0] for row, prompt in enumerate(PROMPTS)] == wanted
    assert added(own, PROMPTS[1:]) != wanted[1:], "another number draws other tokens"


def test_a_row_ends_with_its_end():
    whole = drawn_alone("gpt_neo")
    ends = (whole[0][3], whole[1][5], 400)
    own, heard = small("gpt_neo", asked=dataclasses.replace(DRAWN, eos_token_ids=ends)), list[int]()
    found = own.generate(PROMPTS, on_progress=heard.append)
    for tokens, wanted in zip(found, whole):
        assert tokens == wanted[: 1 + next(i for i, token in enumerate(wanted) if token in ends)]
    assert (len(found[0]) <= 4, len(found[1]) <= 6) == (True, True)
    assert heard == [1, max(map(len, found))], "nothing goes on when all have ended"


def test_one_token_takes_no_step():
    heard: list[int] = []
    own = small("gpt_neo", asked=dataclasses.replace(DRAWN, max_new_tokens=1))
    assert own.generate(PROMPTS, on_progress=heard.append) == [row[:1] for row in drawn_alone("gpt_neo")]
    assert heard == [1]


def test_it_computes_in_bfloat16_but_for_what_is_added_to_logits():
    made = tiny_transformer(GOLDEN["gptj"])
    params = flatten_tree(
        decode.cast_for_inference(made.params_from_tensors(random_tensors(GOLDEN["gptj"])), ForwardConfig("bfloat16"))
    )
    assert {path for path, leaf in params.items() if leaf.dtype != jnp.bfloat16} == {"head.bias"}


def test_where_parts_end():
    at_a_time = generator.STEPS_PER_CHECK
    assert [*generator._decode_stops(64, 64, ())] == []
    assert [*generator._decode_stops(64, 66, ())] == [(66, False)]
    parts = [(64 + at_a_time, False), (64 + 2 * at_a_time, False), (64 + 2 * at_a_time + 1, False)]
    assert [*generator._decode_stops(64, 64 + 2 * at_a_time + 1, ())] == parts
    assert [*generator._decode_stops(64, 70, (68, 65, 64, 71, 30))] == [
        (65, True),
        (67, False),
        (68, True),
        (70, False),
    ]


LEARNED = SMALL["gpt_neo"]["max_position_embeddings"]
WRONG: dict[str, tuple[str, Rows, Rows | None, int, str]] = {
    "nothing": ("llama", [[1], []], None, 1, "a prompt has no tokens"),
    "an empty source": ("t5", [[0]], [[]], 1, "a prompt has no tokens"),
    "no such token": ("llama", [[1, 29]], None, 1, "token 29 is none of the model's - its true vocabulary is 29"),
    "a token below 0": ("llama", [[-1]], None, 1, "token -1 is none"),
    "no such source": ("t5", [[0]], [[500]], 1, "token 500 is none"),
    "too long": (
        "gpt_neo",
        [[1] * 10],
        None,
        LEARNED,
        f"10 tokens of a prompt, and {LEARNED} new ones - the model has {LEARNED} positions - `--max-new-tokens 7`",
    ),
    "far too long": ("gpt_neo", [[1] * (LEARNED + 1)], None, 1, "positions - a shorter prompt"),
    "no encoder": ("llama", [[1]], [[1]], 1, "llama has no encoder"),
    "an encoder": ("t5", [[0]], None, 1, "t5 has an encoder, which has to be given sources"),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_no_model_goes_on_from(why: str):
    name, prompts, sources, new, message = WRONG[why]
    model = tiny_transformer(SMALL[name] | {"vocab_size": 32, "true_vocab_size": 29}).model
    with pytest.raises(PrepError) as caught:
        generator.check_prompts(prompts, sources, model, GenerationConfig(new))
    assert message in str(caught.value)
    assert caught.value.code == USAGE


def test_the_last_position_is_used():
    model = tiny_transformer(SMALL["gpt_neo"] | {"vocab_size": 29}).model
    generator.check_prompts([[1] * 10], None, model, GenerationConfig(LEARNED - 9))
    generator.check_prompts(
        [[1] * 1000], None, tiny_transformer(SMALL["llama"] | {"vocab_size": 29}).model, GenerationConfig(1000)
    )


def test_no_new_tokens_make_no_sense():
    with pytest.raises(PrepError, match="0 new tokens"):
        GenerationConfig(0)


def test_a_step_takes_no_copy_of_layers_that_are_left_over_from_whole_periods():
    config = GOLDEN["gemma3_text"] | {"num_hidden_layers": 9, "hidden_size": 64, "intermediate_size": 512}
    made, prompts, asked = tiny_transformer(config), [[1, 2, 3], [4]], GenerationConfig(3)
    params = made.params_from_tensors(random_tensors(config))
    apart = make_generator(made, params, asked, ForwardConfig(scan_layers=False))
    assert make_generator(made, params, asked).generate(prompts) == apart.generate(prompts)
    given: dict[str, Any] = {"model": made.model, "how": ForwardConfig(), "asked": asked}
    batch = generator._make_prompt_batch(prompts, generator.SLOT_MULTIPLE, 2, asked.max_new_tokens, 0)
    state = jax.eval_shape(partial(decode.prefill, count=generator.SLOT_MULTIPLE, **given), params, batch)
    step = jax.jit(partial(decode.decode_loop, **given), donate_argnums=1)
    memory = step.lower(params, state, jnp.int32(66)).compile().memory_analysis()
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    assert memory is not None
    assert memory.temp_size_in_bytes < layers / 2, (memory.temp_size_in_bytes, layers)
