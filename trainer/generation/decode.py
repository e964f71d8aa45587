"""Decoding on devices: the tokens of prompts all at once, then one after the other, with keys and values kept.

Rows of a batch end in the same slot and begin where they may: positions count from a row's first token, and nothing
sees the slots before it, so that a row has the tokens that it would have alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from trainer.generation.sampling import Sampling, chosen
from trainer.models.errors import usage
from trainer.models.parameters import ENCODER
from trainer.models.tree import Tree, flat, nested
from trainer.nn import transformer as core
from trainer.nn.attention_mask import Cache, Memory, Seen, empty
from trainer.nn.rotary import rotations_at
from trainer.nn.transformer import Compute, Model


@dataclass(frozen=True, slots=True)
class Asked:
    """What to generate: at most so many new tokens a row, up to the first that is among `ends`, which is kept."""

    new_tokens: int
    ends: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Usage PrepError for no tokens."""
        if self.new_tokens < 1:
            raise usage(f"{self.new_tokens} new tokens", "there is nothing to generate", "a number from 1 on")


class Batch(NamedTuple):
    """Rows of tokens, int32 [B, S]: row b's begin in slot `starts[b]`, the first new ones are in slot `first`.

    starts, rows: int32 [B]; what is drawn for a row depends on its number. ended: bool [B]. first: int32 [].
    memory: what an encoder made of the sources.
    """

    tokens: Array
    starts: Array
    rows: Array
    ended: Array
    first: Array
    memory: Memory | None = None


class State(NamedTuple):
    """A batch on its way: the newest tokens are in slot `cache.filled`, all before them have been looked at."""

    batch: Batch
    cache: Cache


def ready(params: Tree, how: Compute) -> Tree:
    """Parameters as all steps use them; those that are so already are not copied."""
    wanted = {path: jnp.dtype(dtype_of(path, how.dtype)) for path in flat(params)}
    return nested({p: leaf if leaf.dtype == wanted[p] else leaf.astype(wanted[p]) for p, leaf in flat(params).items()})


def dtype_of(path: str, computed: str) -> str:
    """The dtype of a parameter in steps that are computed in one: what is added to logits is float32, as they are."""
    return "float32" if path == "head.bias" else computed


def remembered(params: Tree, sources: Array, present: Array, model: Model, how: Compute) -> Memory:
    """Of sources [B, S], `present` where they are no padding, the keys and values of all layers."""
    return core.remembered(params, core.encode(params, sources, model, how, present), model, how)


def prefilled(params: Tree, batch: Batch, count: int, model: Model, how: Compute, asked: Asked) -> State:
    """Of what is in the first `count` slots all keys and values, and the tokens that come next."""
    cache = nothing(model, batch.tokens.shape, how)
    return _continued(params, State(batch, cache), batch.tokens[:, :count], model, how, asked)


def nothing(model: Model, shape: tuple[int, ...], how: Compute) -> Cache:
    """A cache for tokens [B, S], with nothing in it."""
    rows, slots = shape
    keys = next(
        leaf for leaf in model.leaves.values() if leaf.row.endswith("attn.k.weight") and ENCODER not in leaf.row
    )
    heads, head_dim, _ = (extent for axis, extent in enumerate(keys.shape) if axis != keys.stack_axis)
    return empty((len(model.traits.windows), rows, slots, heads, head_dim), how.dtype, how.shards)


def stepped(params: Tree, state: State, until: Array, model: Model, how: Compute, asked: Asked) -> State:
    """One token after the other, up to that in slot `until`, or to when all rows have ended."""

    def more(state: State) -> Array:
        return (state.cache.filled < until) & ~state.batch.ended.all()

    def step(state: State) -> State:
        newest = lax.dynamic_slice_in_dim(state.batch.tokens, state.cache.filled, 1, axis=1)
        return _continued(params, state, newest, model, how, asked)

    return lax.while_loop(more, step, state)


def _continued(params: Tree, state: State, new: Array, model: Model, how: Compute, asked: Asked) -> State:
    """After the tokens `new` [B, T], in the slots from `cache.filled` on."""
    batch = state.batch
    logits, cache = advanced(params, state.cache, new, batch.starts, model, how, batch.memory)
    tokens = chosen(logits, batch.rows, cache.filled - batch.first, asked.sampling)
    ended = batch.ended | jnp.isin(tokens, jnp.array(asked.ends, jnp.int32))
    tokens = lax.dynamic_update_slice(batch.tokens, tokens[:, None], (0, cache.filled))
    return State(batch._replace(tokens=tokens, ended=ended), cache)


def advanced(
    params: Tree, cache: Cache, new: Array, starts: Array, model: Model, how: Compute, memory: Memory | None = None
) -> tuple[Array, Cache]:
    """Float32 logits [B, V] of what comes after the tokens `new` [B, T], in the slots from `cache.filled` on, and the
    cache with them. V is the true vocabulary; `params` are `ready`; row b begins in slot `starts[b]`."""
    slots = cache.keys.shape[2]
    positions = cache.filled + jnp.arange(new.shape[1]) - starts[:, None]
    keys = jnp.arange(slots) - starts[:, None]
    lengths = positions[:, -1] + 1
    turns = {rope: rotations_at(rope, positions, lengths, slots) for rope in model.traits.ropes}
    x = core.embedded(params, new, model, how, jnp.maximum(positions, 0))
    x, found = core.decoded(params, x, model, how, Seen(positions, keys, present=keys >= 0), turns, cache, memory)
    assert found is not None
    return core.logits_of(params, x[:, -1:], model, how)[:, 0, : model.vocab], found
