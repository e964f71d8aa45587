"""A layer: attention and feed-forward part around the residual stream, with norms where the family has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from trainer.distributed.sharding import Shards
from trainer.models.architecture import Traits
from trainer.nn.attention import attention
from trainer.nn.attention_mask import Cache, Memory, Seen
from trainer.nn.mlp import feed_forward
from trainer.nn.moe import mixture
from trainer.nn.norms import norm


def block(
    x: Array,
    weights: Mapping[str, Any],
    traits: Traits,
    seen: Seen,
    shards: Shards,
    cache: Cache | None = None,
    memory: Memory | None = None,
) -> tuple[Array, Cache | None]:
    """[B, T, D] -> [B, T, D], and the cache with the keys and values of these tokens; they look at the memory too."""

    def attend(x: Array) -> tuple[Array, Cache | None]:
        whole = shards.constrain(x, "batch", "seq", "embed")
        return attention(whole, weights["attn"], traits, seen, shards, cache)

    def look(x: Array, memory: Memory) -> Array:
        whole, all_of_it = shards.constrain(x, "batch", "seq", "embed"), Seen(present=memory.present)
        return attention(whole, weights["cross"], traits, all_of_it, shards, memory=memory.states)[0]

    def feed(x: Array) -> Array:
        whole = shards.constrain(x, "batch", "seq", "embed")
        part = mixture if traits.experts_per_token else feed_forward
        return part(whole, weights["mlp"], traits, shards)

    def normed(name: str, x: Array) -> Array:
        return norm(x, weights.get(name, {}), traits)

    taken = x if traits.residual == "post" else normed("attn_norm", x)
    attended, cache = attend(taken)
    match traits.residual:
        case "pre":
            x = split(x + attended, shards)
            if memory is not None:
                x = split(x + look(normed("cross_norm", x), memory), shards)
            x = x + feed(normed("mlp_norm", x))
        case "post":
            x = split(normed("attn_norm", x + attended), shards)
            x = normed("mlp_norm", x + feed(x))
        case "parallel":
            x = x + attended + feed(normed("mlp_norm", x))
        case "parallel_one_norm":
            x = x + attended + feed(taken)
        case "sandwich":
            x = split(x + normed("attn_post_norm", attended), shards)
            x = x + normed("mlp_post_norm", feed(normed("mlp_norm", x)))
    return split(x, shards), cache


def split(x: Array, shards: Shards) -> Array:
    """The residual stream between blocks, told how to lie on the mesh."""
    return shards.constrain(x, "batch", "residual_seq", "embed")
