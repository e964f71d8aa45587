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
from trainer.generation.decode import Asked, Batch, State
from trainer.models.errors import usage
from trainer.models.tree import Tree
from trainer.nn.transformer import Compute, Model

Ids = Sequence[int]
ROUND = 64  # slots for prompts are a multiple of it: batches of about the same length are compiled once
MOST_SLOTS = 1 << 30  # tokens of a text: positions are int32
AT_A_TIME = 16  # tokens between two looks at whether all rows have ended


class _Compiled:
    """A function of arrays, compiled for each shape and place of them; `seconds` that took."""

    def __init__(self, function: Callable[..., Any], **jit: Any) -> None:
        self._jitted = jax.jit(function, **jit)
        self._found: dict[Any, Callable[..., Any]] = {}
        self.seconds = 0.0

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        leaves, structure = jax.tree.flatten(arrays)
        key = (structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves), *static.items())
        if key not in self._found:
            began = time.monotonic()
            self._found[key] = self._jitted.lower(*arrays, **static).compile()
            self.seconds += time.monotonic() - began
        return self._found[key](*arrays)


class Generator:
    """A model that is ready to generate; compiled once for each shape of a batch."""

    def __init__(self, params: Tree, model: Model, how: Compute, asked: Asked) -> None:
        """`params` as they are trained, or already in the dtype of the computation."""
        self.model, self.how, self.asked = model, how, asked
        self.params = decode.ready(params, how)
        given: dict[str, Any] = {"model": model, "how": how}
        self._remember = _Compiled(partial(decode.remembered, **given))
        given["asked"] = asked
        self._prefill = _Compiled(partial(decode.prefilled, **given), static_argnames="count")
        self._step = _Compiled(partial(decode.stepped, **given), donate_argnums=1)

    @property
    def compile_s(self) -> float:
        """Seconds for which all of it was compiled so far."""
        return self._remember.seconds + self._prefill.seconds + self._step.seconds

    def batch(
        self,
        prompts: Sequence[Ids],
        sources: Sequence[Ids] | None = None,
        first_row: int = 0,
        size: int = 0,
        told: Callable[[int], None] = lambda tokens: None,
    ) -> list[list[int]]:
        """The new tokens of each prompt.

        sources: what an encoder reads, one for each prompt. first_row: the number of the first row. size: rows to
        compute at least, so that a smaller batch is not compiled anew. told: how many tokens a row there are so far.
        Usage PrepErrors for prompts without tokens, with tokens that the model lacks, and for more tokens than it has
        positions.
        """
        check(prompts, sources, self.model, self.asked)
        slots = _rounded(max(map(len, prompts)), ROUND)
        rows = _rounded(max(size, len(prompts)), self.how.shards.replicas)
        batch = _laid_out(prompts, slots, rows, self.asked.new_tokens, first_row)
        if sources is not None:
            batch = batch._replace(memory=self._remember(self.params, *_padded(sources, rows)))
        state = self._prefill(self.params, batch, count=slots)
        for slot, anew in _stops(slots, slots + self.asked.new_tokens - 1, self._turns(prompts, slots)):
            told(_made(state, slots))
            if bool(state.batch.ended.all()):
                break
            if anew:
                batch = state.batch
                del state  # its cache, before there is another one
                state = self._prefill(self.params, batch, count=slot)
            else:
                state = self._step(self.params, state, jnp.int32(slot))
        told(_made(state, slots))
        new = np.asarray(state.batch.tokens)[: len(prompts), slots : slots + _made(state, slots)]
        return [_up_to_end(row.tolist(), self.asked.ends) for row in new]

    def _turns(self, prompts: Sequence[Ids], slots: int) -> set[int]:
        """Slots up to which a row has become so long that all its tokens turn otherwise than before: what is kept of
        them is then made anew, so that tokens are those of whole sequences."""
        longest = [rope.positions for rope in self.model.traits.ropes if rope.kind == "longrope"]
        return {slots - len(prompt) + most + 1 for prompt in prompts for most in longest}


def check(prompts: Sequence[Ids], sources: Sequence[Ids] | None, model: Model, asked: Asked) -> None:
    """Usage PrepErrors for prompts that the model cannot go on from."""
    traits, rows = model.traits, [*prompts, *(sources or ())]
    if (sources is None) != (traits.encoder is None):
        has = "no encoder" if traits.encoder is None else "an encoder, which has to be given sources"
        raise usage(f"{model.family.name} has {has}", "sources are what an encoder reads")
    if not all(map(len, rows)):
        raise usage("a prompt has no tokens", "there is nothing to go on from", "a prompt of at least one token")
    lowest, highest = min(map(min, rows)), max(map(max, rows))
    if lowest < 0 or highest >= model.vocab:
        wrong = lowest if lowest < 0 else highest
        raise usage(f"token {wrong:,} is none of the model's", f"its true vocabulary is {model.vocab:,}, from 0 on")
    if max(map(len, rows)) + asked.new_tokens >= MOST_SLOTS:
        raise usage(
            f"{asked.new_tokens:,} new tokens", f"a text has fewer than {MOST_SLOTS:,}", "`--max-new-tokens 64`"
        )
    left = room(prompts, model)
    if left is not None and asked.new_tokens > left:
        what = f"{max(map(len, prompts)):,} tokens of a prompt, and {asked.new_tokens:,} new ones"
        hint = f"`--max-new-tokens {left}`" if left > 0 else "a shorter prompt"
        raise usage(what, f"the model has {traits.positions:,} positions", hint)


def room(prompts: Sequence[Ids], model: Model) -> int | None:
    """How many new tokens there are positions for, of which the last one takes none; None where positions never end."""
    traits = model.traits
    return traits.positions - max(map(len, prompts)) + 1 if traits.learns_positions else None


def _laid_out(prompts: Sequence[Ids], slots: int, rows: int, new: int, first_row: int) -> Batch:
    """Prompts that end in slot `slots`, with room for what is new; rows that fill up the batch have ended already."""
    tokens = np.zeros((rows, slots + new), np.int32)
    starts = np.full(rows, slots - 1, np.int32)
    for row, prompt in enumerate(prompts):
        starts[row] = slots - len(prompt)
        tokens[row, starts[row] : slots] = prompt
    return Batch(
        tokens=jnp.asarray(tokens),
        starts=jnp.asarray(starts),
        rows=jnp.arange(first_row, first_row + rows, dtype=jnp.int32),
        ended=jnp.arange(rows) >= len(prompts),
        first=jnp.int32(slots),
    )


def _padded(sources: Sequence[Ids], rows: int) -> tuple[Array, Array]:
    """Sources [B, S], and where they are no padding; rows that fill up have one token."""
    tokens = np.zeros((rows, _rounded(max(map(len, sources)), ROUND)), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = source
        lengths[row] = len(source)
    return jnp.asarray(tokens), jnp.asarray(np.arange(tokens.shape[1]) < lengths[:, None])


def _stops(first: int, last: int, anew: Iterable[int]) -> Iterator[tuple[int, bool]]:
    """Slots to go to from `first` to `last`; true for those up to which everything is computed anew."""
    at = first
    for turn in (*sorted(turn for turn in anew if first < turn <= last), None):
        goal = last if turn is None else turn - 1
        while at < goal:
            at = min(at + AT_A_TIME, goal)
            yield at, False
        if turn is not None:
            at = turn
            yield at, True


def _made(state: State, slots: int) -> int:
    """How many new tokens a row has."""
    return int(state.cache.filled) - slots + 1


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def _up_to_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first of `ends`, with it."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]
