"""Tests of generation with a KV cache against logits of whole sequences and tokens of transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from prepcli.commands.testing.tiny_model import (
    MAX_NEW_TOKENS,
    PROMPT_LENGTHS,
    TinyTransformer,
    model_logits,
    random_tensors,
    tiny_transformer,
    with_padded_vocab,
)
from prepcli.core.errors import USAGE, PrepError
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree, flatten_tree
from prepcli.models.registry import FAMILIES
from tests.golden import make_decoders, make_greedy
from tests.helpers.shared_steps import share_steps
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import AMBIGUOUS, GOLDEN, T5
from tests.trainer.distributed.test_sharding import CONFIGS, shard_params
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.generation import decode, generator
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator
from trainer.generation.sampling import Sampling
from trainer.nn.cache import KVCache
from trainer.nn.model_spec import ForwardConfig

Rows = list[list[int]]
SAMPLED = GenerationConfig(9, sampling=Sampling(1.3, top_k=20, top_p=0.95, seed=5))
PROMPTS: Rows = [[3, 1, 4, 1, 5], [9, 2]]
MISTRAL_LIKE = CONFIGS["llama"] | {"model_type": "mistral", "sliding_window": 5}
UNPADDED_CONFIGS: dict[str, dict[str, Any]] = {
    **{
        name: {key: value for key, value in config.items() if key != "true_vocab_size"}
        for name, config in (CONFIGS | {"mistral": MISTRAL_LIKE}).items()
    },
    "t5": T5 | {"num_heads": 4, "num_decoder_layers": 2},
}
# one model for each kind of layer and each rotary embedding that depends on the length
FAST_MODELS = ("gpt_neo", "phi3-longrope", "llama-dynamic", "t5")
# one model for each kind of attention to the cache, and of its feed-forward part
FAST_STEPS = (*FAST_MODELS, "gemma2", "qwen3_moe")
SLOTS = PROMPT_LENGTHS[-1] + MAX_NEW_TOKENS - 1


@pytest.fixture(autouse=True, scope="module")
def shared_steps() -> Iterator[None]:
    """Compile the functions of equal generators once."""
    with share_steps():
        yield


@cache
def golden_greedy() -> dict[str, dict[str, list[list[int]]]]:
    """Read the greedy output of transformers by model."""
    return json.loads(make_greedy.FILE.read_text())


def stepwise_logits(
    tiny: TinyTransformer, params: Tree, batch: Mapping[str, Array], start_slots: Array
) -> Array:
    """Decode tokens [B, T] one at a time; return logits [T, B, V]."""
    tokens, model, forward_config, encoder_output = (
        batch["tokens"],
        tiny.model,
        ForwardConfig(),
        None,
    )
    if "source" in batch:
        encoder_output = decode.encode_sources(
            params, batch["source"], batch["present"], model, forward_config
        )

    def step(kv_cache: KVCache, new_tokens: Array) -> tuple[KVCache, Array]:
        logits, kv_cache = decode.decode_step(
            params,
            kv_cache,
            new_tokens[:, None],
            start_slots,
            model=model,
            forward_config=forward_config,
            encoder_output=encoder_output,
        )
        return kv_cache, logits

    return lax.scan(step, decode.init_kv_cache(model, tokens.shape, forward_config), tokens.T)[1]


@cache
def compiled_stepwise_logits(name: str) -> Callable[..., Array]:
    """Return `stepwise_logits` of a golden model, compiled once, since all batches have one shape."""
    return jax.jit(partial(stepwise_logits, tiny_transformer(GOLDEN[name])))


def left_pad(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad rows to SLOTS slots, add rows of one token up to a fixed number, and return their start slots."""
    rows = [*rows, *([0],) * (len(PROMPT_LENGTHS) - len(rows))]
    start_slots = np.array([SLOTS - len(row) for row in rows])
    return np.stack([np.pad(row, (start, 0)) for row, start in zip(rows, start_slots)]), start_slots


def right_pad_sources(rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Right-pad sources to SLOTS slots and return them with their mask."""
    tokens, start_slots = left_pad(rows)
    tokens = np.stack([np.roll(row, -start) for row, start in zip(tokens, start_slots)])
    return {"source": tokens, "present": np.arange(SLOTS) < SLOTS - start_slots[:, None]}


@pytest.mark.parametrize("name", slow_except(GOLDEN, FAST_STEPS))
def test_decode_step_logits_match_transformers(name: str):
    """The batch has rows of 7 and 4 tokens, which end in the same slot."""
    golden = make_decoders.load(name)
    rows = [
        row[:count].tolist() for row, count in zip(golden.short["tokens"], make_decoders.LENGTHS)
    ]
    tokens, start_slots = left_pad(rows)
    batch = {"tokens": tokens}
    if "source" in golden.short:
        masks = golden.short["present"].astype(bool)
        batch |= right_pad_sources(
            [row[mask].tolist() for row, mask in zip(golden.short["source"], masks)]
        )
    params = tiny_transformer(golden.config).params_from_tensors(golden.tensors)
    logits = np.asarray(compiled_stepwise_logits(name)(params, batch, start_slots))
    for row, count in enumerate(make_decoders.LENGTHS):
        assert abs(logits[SLOTS - count :, row] - golden.short_logits[row, :count]).max() <= 2e-5


def test_decode_step_applies_layer_score_scale():
    config = AMBIGUOUS["gpt2-by-depth"]
    tiny, tensors = tiny_transformer(config), random_tensors(config)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (2, 6), dtype=np.int32)
    params = tiny.params_from_tensors(tensors)
    logits = jax.jit(partial(stepwise_logits, tiny))(
        params, {"tokens": tokens}, np.zeros(2, np.int32)
    )
    expected = model_logits(tiny.model, params, {"tokens": tokens})
    np.testing.assert_allclose(np.moveaxis(np.asarray(logits), 0, 1), expected, atol=2e-5)


def make_generator(
    tiny: TinyTransformer,
    params: Tree,
    config: GenerationConfig,
    forward_config: ForwardConfig | None = None,
) -> Generator:
    """Create a generator of a tiny model."""
    return Generator(
        params,
        tiny.model,
        forward_config=forward_config or ForwardConfig(),
        generation_config=config,
    )


def generate(
    model_generator: Generator, prompts: Rows, first_row: int = 0, min_rows: int = 0
) -> Rows:
    """Generate tokens; with an encoder the prompts are sources, and the decoder starts with token 0."""
    if model_generator.model.arch_config.encoder is None:
        return model_generator.generate(prompts, first_row=first_row, min_rows=min_rows)
    return model_generator.generate(
        [[0]] * len(prompts), prompts, first_row=first_row, min_rows=min_rows
    )


@pytest.mark.parametrize("name", slow_except(GOLDEN, ("gpt_neo", "phi3-longrope", "t5")))
def test_greedy_tokens_match_transformers(name: str):
    """Sequences exceed the positions of pretraining of rotary embeddings that depend on the length."""
    config, tensors = make_greedy.greedy_model(name)
    tiny, golden = tiny_transformer(config), golden_greedy()[name]
    greedy = GenerationConfig(MAX_NEW_TOKENS)
    assert (
        generate(make_generator(tiny, tiny.params_from_tensors(tensors), greedy), golden["prompts"])
        == (golden["tokens"])
    )


def test_greedy_file_has_tokens_of_every_config():
    golden = golden_greedy()
    assert {*golden} == {*GOLDEN}
    assert {str(config["model_type"]) for config in GOLDEN.values()} == {*FAMILIES}
    for entry in golden.values():
        assert [len(prompt) for prompt in entry["prompts"]] == [*PROMPT_LENGTHS]
        assert {len(tokens) for tokens in entry["tokens"]} == {MAX_NEW_TOKENS}


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", GOLDEN)
def test_greedy_file_matches_installed_transformers(name: str):
    pytest.importorskip("transformers")
    entry = golden_greedy()[name]
    assert make_greedy.compute(name, entry["prompts"][:1]) == entry["tokens"][:1]


@cache
def sampled_on_one_device(name: str) -> Rows:
    """Return the sampled tokens of PROMPTS on one device."""
    return generate(padded_generator(name), PROMPTS)


def padded_generator(
    name: str,
    sharding: ShardingContext | None = None,
    config: GenerationConfig = SAMPLED,
    **stored: Any,
) -> Generator:
    """Create a generator with a padded vocabulary, whose padding would always be sampled if it were not masked."""
    hf_config = UNPADDED_CONFIGS[name] | {"vocab_size": 29}
    hf_config, tensors = with_padded_vocab(hf_config, random_tensors(hf_config), 3, 50.0)
    tiny = tiny_transformer(hf_config, **stored)
    params = tiny.params_from_tensors(tensors)
    sharding = sharding or ShardingContext()
    if sharding.mesh:
        params = shard_params(tiny, params, sharding)
    forward_config = ForwardConfig(scan_layers=tiny.model.has_stacked_layers, sharding=sharding)
    return make_generator(tiny, params, config, forward_config)


@pytest.mark.parametrize("name", slow_except(("llama", "t5", "gpt_neo", "mistral"), ("llama",)))
def test_sampled_tokens_do_not_depend_on_mesh(name: str):
    sharding = make_sharding_context(parse_mesh("1,2,4"))
    assert generate(padded_generator(name, sharding), PROMPTS) == sampled_on_one_device(name)


def test_padding_rows_are_never_sampled():
    config = UNPADDED_CONFIGS["gpt_neo"] | {"vocab_size": 29}
    tiny = tiny_transformer(config)
    unpadded = make_generator(tiny, tiny.params_from_tensors(random_tensors(config)), SAMPLED)
    assert generate(unpadded, PROMPTS) == sampled_on_one_device("gpt_neo")
    assert max(map(max, sampled_on_one_device("gpt_neo"))) < 29


def test_sampled_tokens_do_not_depend_on_batch():
    llama, expected = padded_generator("llama"), sampled_on_one_device("llama")
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert generate(llama, PROMPTS[1:], first_row=1) == expected[1:]
    assert [
        generate(llama, [prompt], row, min_rows=2)[0] for row, prompt in enumerate(PROMPTS)
    ] == expected
    assert generate(llama, PROMPTS[1:]) != expected[1:], (
        "another row number must sample other tokens"
    )


def ending_generator() -> Generator:
    """Create a generator whose rows end at the fourth and at the sixth token, or before."""
    unlimited = sampled_on_one_device("gpt_neo")
    eos_token_ids = (unlimited[0][3], unlimited[1][5], 400)
    config = dataclasses.replace(SAMPLED, eos_token_ids=eos_token_ids)
    return padded_generator("gpt_neo", config=config)


def test_rows_end_after_their_first_eos_token():
    unlimited = sampled_on_one_device("gpt_neo")
    gpt_neo = ending_generator()
    eos_token_ids = gpt_neo.generation_config.eos_token_ids
    progress: list[int] = []
    output = gpt_neo.generate(PROMPTS, on_progress=progress.append)
    for tokens, unlimited_tokens in zip(output, unlimited):
        end = next(i for i, token in enumerate(unlimited_tokens) if token in eos_token_ids)
        assert tokens == unlimited_tokens[: end + 1]
    assert len(output[0]) <= 4
    assert len(output[1]) <= 6
    assert progress == [1, max(map(len, output))], "decoding must stop when all rows have ended"


@pytest.mark.parametrize("delay_s", [0.0, 1000.0])
def test_new_tokens_arrive_during_decoding(delay_s: float, monkeypatch: pytest.MonkeyPatch):
    """Calls decode one token each if they are slow, and more tokens each time if they are fast."""
    monkeypatch.setattr(generator, "MAX_STREAM_DELAY_S", delay_s)
    received: list[Rows] = []
    output = padded_generator("gpt_neo").generate(PROMPTS, on_tokens=received.append)
    assert output == sampled_on_one_device("gpt_neo")
    assert [
        [token for call in received for token in call[row]] for row in range(len(PROMPTS))
    ] == output
    assert [len(call[1]) for call in received] == ([1] * 9 if delay_s == 0 else [1, 1, 2, 4, 1])


def test_streamed_tokens_end_when_their_row_ends():
    unlimited, received = sampled_on_one_device("gpt_neo"), list[Rows]()
    gpt_neo = ending_generator()
    output = gpt_neo.generate(PROMPTS, on_tokens=received.append)
    eos_token_ids = gpt_neo.generation_config.eos_token_ids
    for tokens, unlimited_tokens in zip(output, unlimited):
        end = next(i for i, token in enumerate(unlimited_tokens) if token in eos_token_ids)
        assert tokens == unlimited_tokens[: end + 1]
    assert [
        [token for call in received for token in call[row]] for row in range(len(PROMPTS))
    ] == output


def test_one_new_token_needs_no_decode_loop():
    progress: list[int] = []
    gpt_neo = padded_generator("gpt_neo", config=dataclasses.replace(SAMPLED, max_new_tokens=1))
    output = gpt_neo.generate(PROMPTS, on_progress=progress.append)
    assert output == [row[:1] for row in sampled_on_one_device("gpt_neo")]
    assert progress == [1]


def test_cast_for_inference_keeps_lm_head_bias_in_float32():
    tiny = tiny_transformer(GOLDEN["gptj"])
    params = tiny.params_from_tensors(random_tensors(GOLDEN["gptj"]))
    cast = flatten_tree(
        decode.cast_for_inference(params, tiny.model, forward_config=ForwardConfig("bfloat16"))
    )
    assert {path for path, leaf in cast.items() if leaf.dtype != jnp.bfloat16} == {"head.bias"}


MAX_POSITIONS = UNPADDED_CONFIGS["gpt_neo"]["max_position_embeddings"]
# Name of the case -> model, prompts, sources, number of new tokens, and message.
INVALID: dict[str, tuple[str, Rows, Rows | None, int, str]] = {
    "empty prompt": (
        "llama",
        [[1], []],
        None,
        1,
        "empty prompt - a prompt must have at least one token",
    ),
    "empty source": ("t5", [[0]], [[]], 1, "empty prompt"),
    "token too large": (
        "llama",
        [[1, 29]],
        None,
        1,
        "token id 29 is out of range - the vocabulary has 29 tokens",
    ),
    "negative token": ("llama", [[-1]], None, 1, "token id -1 is out of range"),
    "source token too large": ("t5", [[0]], [[500]], 1, "token id 500 is out of range"),
    "too many new tokens": (
        "gpt_neo",
        [[1] * 10],
        None,
        MAX_POSITIONS,
        f"a prompt of 10 tokens and {MAX_POSITIONS} new tokens are too long - the model has {MAX_POSITIONS} positions"
        " - `--max-new-tokens 7`",
    ),
    "prompt too long": (
        "gpt_neo",
        [[1] * (MAX_POSITIONS + 1)],
        None,
        1,
        "positions - use a shorter prompt",
    ),
    "no encoder": ("llama", [[1]], [[1]], 1, "llama has no encoder - sources are supported only"),
    "no sources": (
        "t5",
        [[0]],
        None,
        1,
        "t5 has an encoder - a source is required for each prompt",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_check_prompts_rejects_invalid_prompts(case: str):
    name, prompts, sources, max_new_tokens, message = INVALID[case]
    model = tiny_transformer(
        UNPADDED_CONFIGS[name] | {"vocab_size": 32, "true_vocab_size": 29}
    ).model
    with pytest.raises(PrepError) as caught:
        generator.check_prompts(
            prompts, sources, model=model, generation_config=GenerationConfig(max_new_tokens)
        )
    assert message in caught.value.message
    assert caught.value.code == USAGE


def test_check_prompts_allows_all_positions():
    gpt_neo = tiny_transformer(UNPADDED_CONFIGS["gpt_neo"] | {"vocab_size": 29}).model
    generator.check_prompts(
        [[1] * 10], None, model=gpt_neo, generation_config=GenerationConfig(MAX_POSITIONS - 9)
    )
    llama = tiny_transformer(UNPADDED_CONFIGS["llama"] | {"vocab_size": 29}).model
    generator.check_prompts(
        [[1] * 1000], None, model=llama, generation_config=GenerationConfig(1000)
    )


def test_generation_config_rejects_zero_new_tokens():
    with pytest.raises(PrepError, match="max_new_tokens 0 is out of range"):
        GenerationConfig(0)
