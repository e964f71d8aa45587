"""A layer: attention and feed-forward part around the residual stream, with norms where the family has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from trainer.layers.attention import attention
from trainer.layers.experts import mixture
from trainer.layers.ffn import feed_forward
from trainer.layers.norms import norm
from trainer.sharding import Shards
from trainer.traits import Traits

Turns = tuple[Array, Array] | None  # cosine and sine of rotary positions


def block(x: Array, weights: Mapping[str, Any], traits: Traits, window: int, turns: Turns, shards: Shards) -> Array:
    """[B, T, D] -> [B, T, D]."""

    def attend(x: Array) -> Array:
        whole = shards.constrain(x, "batch", "seq", "embed")
        return attention(whole, weights["attn"], traits, window, turns, shards)

    def feed(x: Array) -> Array:
        whole = shards.constrain(x, "batch", "seq", "embed")
        part = mixture if traits.experts_per_token else feed_forward
        return part(whole, weights["mlp"], traits, shards)

    def normed(name: str, x: Array) -> Array:
        return norm(x, weights.get(name, {}), traits)

    match traits.residual:
        case "pre":
            x = split(x + attend(normed("attn_norm", x)), shards)
            return split(x + feed(normed("mlp_norm", x)), shards)
        case "post":
            x = split(normed("attn_norm", x + attend(x)), shards)
            return split(normed("mlp_norm", x + feed(x)), shards)
        case "parallel":
            return split(x + attend(normed("attn_norm", x)) + feed(normed("mlp_norm", x)), shards)
        case "parallel_one_norm":
            shared = normed("attn_norm", x)
            return split(x + attend(shared) + feed(shared), shards)
        case "sandwich":
            x = split(x + normed("attn_post_norm", attend(normed("attn_norm", x))), shards)
            return split(x + normed("mlp_post_norm", feed(normed("mlp_norm", x))), shards)


def split(x: Array, shards: Shards) -> Array:
    """The residual stream between blocks, told how to lie on the mesh."""
    return shards.constrain(x, "batch", "residual_seq", "embed")
