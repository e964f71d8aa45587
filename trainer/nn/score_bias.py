"""The relative position bias of attention scores, computed for any tile of queries and keys.

Axes: B rows of the batch, T queries, S keys, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jax import Array

from prepcli.models.position_bias import Alibi, RelativePositionBias
from trainer.distributed.sharding import ShardingContext
from trainer.nn.position_encoding import alibi_bias, relative_position_bias


@dataclass(frozen=True, slots=True)
class ScoreBias:
    """A bias that depends on the positions of a query and a key.

    Attributes:
        table: Bias by bucket [buckets, H], a parameter, or ALiBi's slopes [1, H], constants.
        config: The kind of the bias.
        sharding: The device mesh and its rules.
        precomputed: Bias of all queries and keys, computed once for all layers. None computes it from positions.
    """

    table: Array
    config: RelativePositionBias | Alibi
    sharding: ShardingContext = field(default_factory=ShardingContext)
    precomputed: Array | None = None

    def materialize(self, q_positions: Array, kv_positions: Array) -> Array:
        """Compute the bias for query positions [T] or [B, T] and key positions [S] or [B, S].

        Returns:
            float32 [H, T, S], or [B, H, T, S] if rows differ.
        """
        if self.precomputed is not None:
            return self.precomputed
        if isinstance(self.config, Alibi):
            bias = alibi_bias(self.table[0], q_positions, kv_positions)
        else:
            bias = relative_position_bias(self.table, q_positions, kv_positions, self.config)
        return self.sharding.constrain(bias, *("batch",) * (bias.ndim - 3), "heads", "seq", "seq")
