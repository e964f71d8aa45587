"""Generation from the host: prompts as batches, and the schedule of compiled calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from prepcli.core.errors import Option, text, usage_error
from prepcli.models.param_tree import Tree
from trainer.distributed.compilation import CompiledFunction
from trainer.distributed.sharding import ShardingContext
from trainer.generation import decode
from trainer.generation.decode import DecodeState, GenerationConfig, PromptBatch
from trainer.nn.model_spec import ForwardConfig, ModelSpec

TokenSequence = Sequence[int]
# Takes the next token of a row, and returns whether a stop text ends with it.
EndsWithStop = Callable[[int], bool]
# Prompt slots are rounded up to it, so that batches of similar length share one executable.
SLOT_MULTIPLE = 64
# Positions are int32. Kernels subtract -2^30 from them (`tiles.FAR`), and the result must fit.
MAX_SLOTS = 1 << 30
# Decoding steps between checks whether all rows have ended. A check waits for the devices.
STEPS_PER_CHECK = 16
# Maximum seconds that a streamed token waits for the end of its compiled call. Longer delays are
# visible.
MAX_STREAM_DELAY_S = 0.05

InputT = TypeVar("InputT")


def _jit_function(function: partial[Any], **jit_options: Any) -> CompiledFunction:
    return CompiledFunction(jax.jit(function, **jit_options))


class Generator:
    """A model with its parameters on devices, which generates tokens for batches of prompts.

    Functions are compiled once per shape of a batch.
    """

    def __init__(
        self,
        params: Tree | None,
        model: ModelSpec,
        *,
        forward_config: ForwardConfig,
        generation_config: GenerationConfig,
    ) -> None:
        """Cast the parameters and prepare the compiled functions.

        Args:
            params: Parameters in float32 or in the dtype of the computation. None for a generator that only makes
                other generators by `with_params`.
            model: The model.
            forward_config: Execution options.
            generation_config: Options of generation.
        """
        self.model = model
        self.forward_config = forward_config
        self.generation_config = generation_config
        self.params: Tree = {}
        if params is not None:
            self.params = self._cast_params(params)
        cast_model = decode.inference_model(model)
        encode = partial(decode.encode_sources, model=cast_model, forward_config=forward_config)
        options: dict[str, Any] = {
            "model": cast_model,
            "forward_config": forward_config,
            "generation_config": generation_config,
        }
        self._encode_sources = _jit_function(encode)
        self._prefill = _jit_function(partial(decode.prefill, **options), static_argnames="count")
        # Argument 1 is the state. XLA then updates the KV cache in place instead of copying it.
        self._decode_loop = _jit_function(partial(decode.decode_loop, **options), donate_argnums=1)

    def with_params(self, params: Tree) -> Generator:
        """Return a generator with other parameters and the same compiled functions."""
        # A shallow copy shares the compiled functions: parameters are arguments of them, not constants.
        generator = copy(self)
        generator.params = self._cast_params(params)
        return generator

    def _cast_params(self, params: Tree) -> Tree:
        """Cast and reshard parameters for decoding."""
        return decode.cast_for_inference(params, self.model, forward_config=self.forward_config)

    @property
    def compile_s(self) -> float:
        """Seconds of compilation so far."""
        return (
            self._encode_sources.compile_s + self._prefill.compile_s + self._decode_loop.compile_s
        )

    def generate(
        self,
        prompts: Sequence[TokenSequence],
        sources: Sequence[TokenSequence] | None = None,
        *,
        first_row: int = 0,
        min_rows: int = 0,
        min_slots: int = 0,
        max_new_tokens: int | None = None,
        ends_with_stop: Sequence[EndsWithStop] | None = None,
        on_progress: Callable[[int], None] = lambda tokens: None,
        on_tokens: Callable[[list[list[int]]], None] | None = None,
    ) -> list[list[int]]:
        """Generate tokens for a batch of prompts.

        Args:
            prompts: Token ids of each prompt.
            sources: Token ids of each prompt's source, for a model with an encoder.
            first_row: Number of the first row. The sampled tokens of a row depend on its number.
            min_rows: Minimum number of rows to compute. A smaller last batch then reuses the compiled functions.
            min_slots: Minimum number of prompt slots to compute. A longer prompt then reuses the compiled functions.
            max_new_tokens: Maximum number of new tokens per row, if it is less than the one of the options.
            ends_with_stop: For each prompt, a function that takes its next token and returns whether a stop text ends
                with it. The token is then the last one of the prompt.
            on_progress: Called with the number of new tokens per row so far.
            on_tokens: Called during decoding with the next tokens of each prompt. Fewer tokens are then decoded at a
                time, so that they arrive soon. In a job of several processes, all of them pass it or none.

        Returns:
            The new tokens of each prompt, up to and including the first end token or the end of a stop text.

        Raises:
            UsageError: A prompt is empty or has an unknown token, or the new tokens exceed the model's positions.
        """
        generation_config = self.generation_config
        num_slots = generation_config.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = num_slots
        limited = replace(generation_config, max_new_tokens=min(max_new_tokens, num_slots))
        check_prompts(prompts, sources, model=self.model, generation_config=limited)
        slots = _round_up(max(min_slots, *map(len, prompts)), SLOT_MULTIPLE)
        sharding = self.forward_config.sharding
        rows = _round_up(max(min_rows, len(prompts)), sharding.data_parallel_size)
        batch = _make_prompt_batch(prompts, slots, rows, num_slots, first_row)
        batch = _replicate_arrays(batch, sharding)
        if sources is not None:
            inputs = _replicate_arrays(_pad_sources(sources, rows), sharding)
            batch = batch._replace(encoder_output=self._encode_sources(self.params, *inputs))
        state = self._prefill(self.params, batch, count=slots)
        output = _OutputRows(len(prompts), slots, generation_config.eos_token_ids, ends_with_stop)

        def report_progress() -> None:
            on_progress(int(state.kv_cache.length) - slots + 1)
            if on_tokens is not None:
                on_tokens(output.fetch(state, sharding))
            elif ends_with_stop is not None:
                output.fetch(state, sharding)

        is_paced = on_tokens is not None and _shared_sharding(sharding) is None
        choose_num_steps = _steps_between_checks
        # Processes of a job must choose the same steps, so only a single process may go by the clock.
        if is_paced:
            choose_num_steps = _StreamPace().choose_num_steps
        # The prefill samples the token of slot `slots`, so 3 new tokens in slots 64 to 66 need 2 more steps.
        stops = _decode_stops(
            slots,
            slots + limited.max_new_tokens - 1,
            self._recompute_slots(prompts, slots),
            choose_num_steps,
        )
        for slot, is_recomputed in stops:
            report_progress()
            if bool(state.batch.is_finished.all()) or output.all_ended:
                break
            if is_recomputed:
                batch = state.batch
                # Free the cache of the old state before the next one is allocated.
                del state
                state = self._prefill(self.params, batch, count=slot)
            else:
                # An array, because a compiled function needs the shape and the sharding of each argument.
                state = self._decode_loop(
                    self.params, state, _replicate_arrays(jnp.int32(slot), sharding)
                )
        report_progress()
        output.fetch(state, sharding)
        return output.rows

    def _recompute_slots(self, prompts: Sequence[TokenSequence], slots: int) -> set[int]:
        """Return the slots where a row exceeds the original positions of a longrope embedding."""
        # The rotary frequencies of all its tokens change there. The cache is then recomputed, and the
        # output equals a forward pass over the whole sequence.
        stops: set[int] = set()
        for rope in self.model.arch_config.ropes:
            if rope.rope_type != "longrope":
                continue
            for prompt in prompts:
                # e.g. a prompt of 10 tokens in 64 slots starts in slot 54. With 32 original
                # positions, the token in slot 54 + 32 = 86 is the first beyond them. Decoding
                # stops when 87 slots are filled, to recompute the cache.
                start_slot = slots - len(prompt)
                stops.add(start_slot + rope.original_max_positions + 1)
        return stops


class _OutputRows:
    """The new tokens of each prompt, fetched from the devices, up to and including the one that ends a row."""

    def __init__(
        self,
        num_prompts: int,
        first_slot: int,
        eos_token_ids: Sequence[int],
        ends_with_stop: Sequence[EndsWithStop] | None,
    ) -> None:
        """Create an empty row per prompt. Slot `first_slot` has the first new token."""
        self.rows: list[list[int]] = [[] for _ in range(num_prompts)]
        self._has_ended = [False] * num_prompts
        self._next_slot = first_slot
        self._eos_token_ids = eos_token_ids
        self._ends_with_stop = ends_with_stop

    @property
    def all_ended(self) -> bool:
        """Whether all rows have ended, as far as their tokens have been fetched."""
        return all(self._has_ended)

    def fetch(self, state: DecodeState, sharding: ShardingContext) -> list[list[int]]:
        """Append the tokens since the last call to `rows`, and return only these tokens, one list per prompt."""
        # The latest tokens are in slot `length`, one after the last filled slot of the cache.
        stop = int(state.kv_cache.length) + 1
        array = state.batch.tokens
        if not array.is_fully_addressable:
            # From the devices of all processes.
            array = jax.jit(lambda x: x, out_shardings=sharding.replicated_sharding())(array)
        tokens = np.asarray(array)[: len(self.rows), self._next_slot : stop]
        self._next_slot = stop
        return [self._extend(number, new.tolist()) for number, new in enumerate(tokens)]

    def _extend(self, number: int, tokens: list[int]) -> list[int]:
        """Add tokens to a row until it ends, and return the added tokens."""
        added: list[int] = []
        for token in tokens:
            if self._has_ended[number]:
                break
            added.append(token)
            is_stop = self._ends_with_stop is not None and self._ends_with_stop[number](token)
            self._has_ended[number] = is_stop or token in self._eos_token_ids
        self.rows[number] += added
        return added


def check_prompts(
    prompts: Sequence[TokenSequence],
    sources: Sequence[TokenSequence] | None,
    *,
    model: ModelSpec,
    generation_config: GenerationConfig,
) -> None:
    """Check that the model can generate from the prompts.

    Args:
        prompts: Token ids of each prompt.
        sources: Token ids of each prompt's source. None if there is no encoder.
        model: The model.
        generation_config: Options of generation.

    Raises:
        UsageError: Sources are missing or not supported, a prompt is empty, a token id is out of range, or there are
            too many new tokens.
    """
    arch_config = model.arch_config
    rows = [*prompts, *(sources or ())]
    max_new_tokens = generation_config.max_new_tokens
    if (sources is None) != (arch_config.encoder is None):
        if arch_config.encoder is None:
            raise usage_error(
                f"{model.family.name} has no encoder",
                "sources are supported only for encoder-decoder models",
                "pass prompts without sources",
            )
        why = "a source is required for each prompt"
        raise usage_error(
            f"{model.family.name} has an encoder", why, "pass a source with each prompt"
        )
    if not all(map(len, rows)):
        why = "a prompt must have at least one token"
        raise usage_error("empty prompt", why, "remove it, or add text to it")
    lowest = min(map(min, rows))
    highest = max(map(max, rows))
    if lowest < 0 or highest >= model.true_vocab_size:
        token = lowest if lowest < 0 else highest
        raise usage_error(
            f"token id {token} is out of range",
            f"the vocabulary has {model.true_vocab_size:,} tokens",
            "use the tokenizer of this model",
        )
    if max(map(len, rows)) + max_new_tokens >= MAX_SLOTS:
        what = f"{max_new_tokens:,} new tokens are too many"
        why = f"prompt and output must be below {MAX_SLOTS:,}"
        raise usage_error(what, why, text("{}", Option("max_new_tokens", 64)))
    num_fitting = max_fitting_new_tokens(prompts, model)
    if num_fitting is not None and max_new_tokens > num_fitting:
        what = f"a prompt of {max(map(len, prompts)):,} tokens and {max_new_tokens:,} new tokens are too long"
        hint = "use a shorter prompt"
        if num_fitting > 0:
            hint = text("{}", Option("max_new_tokens", num_fitting))
        raise usage_error(what, f"the model has {arch_config.max_positions:,} positions", hint)


def max_fitting_new_tokens(prompts: Sequence[TokenSequence], model: ModelSpec) -> int | None:
    """Return the number of new tokens that fit the model's positions. None if its positions are unlimited.

    The last new token needs no position, since the model does not read it.
    """
    arch_config = model.arch_config
    return (
        arch_config.max_positions - max(map(len, prompts)) + 1
        if arch_config.has_limited_positions
        else None
    )


def _make_prompt_batch(
    prompts: Sequence[TokenSequence], slots: int, rows: int, max_new_tokens: int, first_row: int
) -> PromptBatch:
    """Lay out prompts that end before slot `slots`, with room for new tokens. Padding rows are finished."""
    tokens = np.zeros((rows, slots + max_new_tokens), np.int32)
    # A padding row has one token, so that its attention has a key.
    start_slots = np.full(rows, slots - 1, np.int32)
    for row, prompt in enumerate(prompts):
        start_slots[row] = slots - len(prompt)
        tokens[row, start_slots[row] : slots] = prompt
    return PromptBatch(
        tokens=jnp.asarray(tokens),
        start_slots=jnp.asarray(start_slots),
        row_numbers=jnp.arange(first_row, first_row + rows, dtype=jnp.int32),
        is_finished=jnp.arange(rows) >= len(prompts),
        first_new_slot=jnp.int32(slots),
    )


def _replicate_arrays(arrays: InputT, sharding: ShardingContext) -> InputT:
    """Place the inputs of a batch on all devices of a mesh that other processes share. All have equal inputs."""
    replicated = _shared_sharding(sharding)
    if replicated is None:
        return arrays

    def place(array: Array) -> Array:
        # `jax.device_put` to devices of other processes compares the values across processes first.
        # The callback needs no such exchange.
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, replicated, lambda index: host[index])

    return jax.tree.map(place, arrays)


def _shared_sharding(sharding: ShardingContext) -> NamedSharding | None:
    """Return the sharding of replicated arrays on a mesh that other processes share. None for other meshes."""
    replicated = sharding.replicated_sharding()
    return None if replicated is None or replicated.is_fully_addressable else replicated


def _pad_sources(sources: Sequence[TokenSequence], rows: int) -> tuple[Array, Array]:
    """Return right-padded sources [B, S] and their mask. Padding rows have one token."""
    tokens = np.zeros((rows, _round_up(max(map(len, sources)), SLOT_MULTIPLE)), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = source
        lengths[row] = len(source)
    return jnp.asarray(tokens), jnp.asarray(np.arange(tokens.shape[1]) < lengths[:, None])


def _steps_between_checks() -> int:
    """Return the number of decoding steps before the host checks whether all rows have ended."""
    return STEPS_PER_CHECK


class _StreamPace:
    """The number of decoding steps of each compiled call: from 1 on, growing only while calls are short."""

    def __init__(self) -> None:
        """Begin with one step in the first call."""
        self._steps = 1
        # The first duration is infinite, so the first call has one step, however fast the devices are.
        self._called_s = -math.inf

    def choose_num_steps(self) -> int:
        """Choose the number of decoding steps of the next call from the duration of the last call."""
        duration_s = time.monotonic() - self._called_s
        if duration_s < MAX_STREAM_DELAY_S / 2:
            self._steps = min(2 * self._steps, STEPS_PER_CHECK)
        elif duration_s > MAX_STREAM_DELAY_S:
            self._steps = max(1, self._steps // 2)
        self._called_s = time.monotonic()
        return self._steps


def _decode_stops(
    first_slot: int,
    last_slot: int,
    recompute_slots: Iterable[int],
    choose_num_steps: Callable[[], int],
) -> Iterator[tuple[int, bool]]:
    """Yield the slots at which decoding returns to the host, and whether the cache is recomputed up to the slot."""
    slot = first_slot
    for recompute_slot in (
        *sorted(s for s in recompute_slots if first_slot < s <= last_slot),
        None,
    ):
        # A prefill of 87 slots reads the tokens of slots 0 to 86, so decoding stops when slot 86 is filled.
        last_decoded = last_slot if recompute_slot is None else recompute_slot - 1
        while slot < last_decoded:
            slot = min(slot + choose_num_steps(), last_decoded)
            yield slot, False
        if recompute_slot is not None:
            slot = recompute_slot
            yield slot, True


def _round_up(count: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-count // multiple) * multiple
