"""Generation on the host: prompts laid out as a batch, and how far that goes at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from trainer.generation import decode
from trainer.generation.decode import DecodeState, GenerationConfig, PromptBatch
from trainer.models.errors import usage_error
from trainer.models.param_tree import Tree
from trainer.nn.transformer import ForwardConfig, ModelSpec

TokenSequence = Sequence[int]
SLOT_MULTIPLE = 64  # slots for prompts are a multiple of it: batches of about the same length are compiled once
MAX_SLOTS = 1 << 30  # tokens of a text: positions are int32
STEPS_PER_CHECK = 16  # tokens between two looks at whether all rows have ended


class _CompiledFunction:
    """A function of arrays, compiled for each shape and place of them; `seconds` that took."""

    def __init__(self, function: Callable[..., Any], **jit: Any) -> None:
        self._jitted = jax.jit(function, **jit)
        self._executables: dict[Any, Callable[..., Any]] = {}
        self.compile_s = 0.0

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        leaves, structure = jax.tree.flatten(arrays)
        key = (structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves), *static.items())
        if key not in self._executables:
            began = time.monotonic()
            self._executables[key] = self._jitted.lower(*arrays, **static).compile()
            self.compile_s += time.monotonic() - began
        return self._executables[key](*arrays)


class Generator:
    """A model that is ready to generate; compiled once for each shape of a batch."""

    def __init__(
        self, params: Tree, model: ModelSpec, forward_config: ForwardConfig, generation_config: GenerationConfig
    ) -> None:
        """`params` as they are trained, or already in the dtype of the computation."""
        self.model, self.forward_config, self.generation_config = model, forward_config, generation_config
        self.params = decode.cast_for_inference(params, forward_config)
        given: dict[str, Any] = {"model": model, "how": forward_config}
        self._encode_sources = _CompiledFunction(partial(decode.encode_sources, **given))
        given["asked"] = generation_config
        self._prefill = _CompiledFunction(partial(decode.prefill, **given), static_argnames="count")
        self._decode_loop = _CompiledFunction(partial(decode.decode_loop, **given), donate_argnums=1)

    @property
    def compile_s(self) -> float:
        """Seconds for which all of it was compiled so far."""
        return self._encode_sources.compile_s + self._prefill.compile_s + self._decode_loop.compile_s

    def generate(
        self,
        prompts: Sequence[TokenSequence],
        sources: Sequence[TokenSequence] | None = None,
        first_row: int = 0,
        min_rows: int = 0,
        on_progress: Callable[[int], None] = lambda tokens: None,
    ) -> list[list[int]]:
        """The new tokens of each prompt.

        sources: what an encoder reads, one for each prompt. first_row: the number of the first row. size: rows to
        compute at least, so that a smaller batch is not compiled anew. told: how many tokens a row there are so far.
        Usage PrepErrors for prompts without tokens, with tokens that the model lacks, and for more tokens than it has
        positions.
        """
        check_prompts(prompts, sources, self.model, self.generation_config)
        slots = _round_up(max(map(len, prompts)), SLOT_MULTIPLE)
        rows = _round_up(max(min_rows, len(prompts)), self.forward_config.sharding.data_parallel_size)
        batch = _make_prompt_batch(prompts, slots, rows, self.generation_config.max_new_tokens, first_row)
        if sources is not None:
            batch = batch._replace(encoder_output=self._encode_sources(self.params, *_pad_sources(sources, rows)))
        state = self._prefill(self.params, batch, count=slots)
        for slot, anew in _decode_stops(
            slots, slots + self.generation_config.max_new_tokens - 1, self._recompute_slots(prompts, slots)
        ):
            on_progress(_num_new_tokens(state, slots))
            if bool(state.batch.ended.all()):
                break
            if anew:
                batch = state.batch
                del state  # its cache, before there is another one
                state = self._prefill(self.params, batch, count=slot)
            else:
                state = self._decode_loop(self.params, state, jnp.int32(slot))
        on_progress(_num_new_tokens(state, slots))
        new = np.asarray(state.batch.tokens)[: len(prompts), slots : slots + _num_new_tokens(state, slots)]
        return [_truncate_after_eos(row.tolist(), self.generation_config.eos_token_ids) for row in new]

    def _recompute_slots(self, prompts: Sequence[TokenSequence], slots: int) -> set[int]:
        """Slots up to which a row has become so long that all its tokens turn otherwise than before: what is kept of
        them is then made anew, so that tokens are those of whole sequences."""
        longest = [rope.original_max_positions for rope in self.model.arch_config.ropes if rope.rope_type == "longrope"]
        return {slots - len(prompt) + most + 1 for prompt in prompts for most in longest}


def check_prompts(
    prompts: Sequence[TokenSequence],
    sources: Sequence[TokenSequence] | None,
    model: ModelSpec,
    generation_config: GenerationConfig,
) -> None:
    """Usage PrepErrors for prompts that the model cannot go on from."""
    traits, rows = model.arch_config, [*prompts, *(sources or ())]
    if (sources is None) != (traits.encoder is None):
        has = "no encoder" if traits.encoder is None else "an encoder, which has to be given sources"
        raise usage_error(f"{model.family.name} has {has}", "sources are what an encoder reads")
    if not all(map(len, rows)):
        raise usage_error("a prompt has no tokens", "there is nothing to go on from", "a prompt of at least one token")
    lowest, highest = min(map(min, rows)), max(map(max, rows))
    if lowest < 0 or highest >= model.true_vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise usage_error(
            f"token {wrong:,} is none of the model's", f"its true vocabulary is {model.true_vocab_size:,}, from 0 on"
        )
    if max(map(len, rows)) + generation_config.max_new_tokens >= MAX_SLOTS:
        raise usage_error(
            f"{generation_config.max_new_tokens:,} new tokens",
            f"a text has fewer than {MAX_SLOTS:,}",
            "`--max-new-tokens 64`",
        )
    left = max_fitting_new_tokens(prompts, model)
    if left is not None and generation_config.max_new_tokens > left:
        what = f"{max(map(len, prompts)):,} tokens of a prompt, and {generation_config.max_new_tokens:,} new ones"
        hint = f"`--max-new-tokens {left}`" if left > 0 else "a shorter prompt"
        raise usage_error(what, f"the model has {traits.max_positions:,} positions", hint)


def max_fitting_new_tokens(prompts: Sequence[TokenSequence], model: ModelSpec) -> int | None:
    """How many new tokens there are positions for, of which the last one takes none; None where positions never end."""
    traits = model.arch_config
    return traits.max_positions - max(map(len, prompts)) + 1 if traits.has_learned_positions else None


def _make_prompt_batch(
    prompts: Sequence[TokenSequence], slots: int, rows: int, max_new_tokens: int, first_row: int
) -> PromptBatch:
    """Prompts that end in slot `slots`, with room for what is new; rows that fill up the batch have ended already."""
    tokens = np.zeros((rows, slots + max_new_tokens), np.int32)
    starts = np.full(rows, slots - 1, np.int32)
    for row, prompt in enumerate(prompts):
        starts[row] = slots - len(prompt)
        tokens[row, starts[row] : slots] = prompt
    return PromptBatch(
        tokens=jnp.asarray(tokens),
        start_slots=jnp.asarray(starts),
        row_numbers=jnp.arange(first_row, first_row + rows, dtype=jnp.int32),
        is_finished=jnp.arange(rows) >= len(prompts),
        first_new_slot=jnp.int32(slots),
    )


def _pad_sources(sources: Sequence[TokenSequence], rows: int) -> tuple[Array, Array]:
    """Sources [B, S], and where they are no padding; rows that fill up have one token."""
    tokens = np.zeros((rows, _round_up(max(map(len, sources)), SLOT_MULTIPLE)), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = source
        lengths[row] = len(source)
    return jnp.asarray(tokens), jnp.asarray(np.arange(tokens.shape[1]) < lengths[:, None])


def _decode_stops(first_slot: int, last_slot: int, recompute_slots: Iterable[int]) -> Iterator[tuple[int, bool]]:
    """Slots to go to from `first` to `last`; true for those up to which everything is computed anew."""
    at = first_slot
    for turn in (*sorted(turn for turn in recompute_slots if first_slot < turn <= last_slot), None):
        goal = last_slot if turn is None else turn - 1
        while at < goal:
            at = min(at + STEPS_PER_CHECK, goal)
            yield at, False
        if turn is not None:
            at = turn
            yield at, True


def _num_new_tokens(state: DecodeState, slots: int) -> int:
    """How many new tokens a row has."""
    return int(state.kv_cache.length) - slots + 1


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _truncate_after_eos(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Up to the first of `ends`, with it."""
    at = next((i for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
    return tokens[: at + 1]
