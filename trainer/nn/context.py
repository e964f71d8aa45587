"""The inputs of a layer besides its weights and the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.nn.attention_mask import AttentionMask, EncoderOutput
from trainer.nn.dropout import LayerDropout, Site
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The context in which a layer runs.

    Attributes:
        arch_config: The choices of the layers.
        mask: Visible keys, rotary embedding and score bias of self-attention.
        sharding: The device mesh and its rules.
        kv_cache: Cache that keys and values are appended to; None to attend to the layer's input alone.
        encoder_output: Input of cross-attention; None without an encoder.
        attention_options: The kernel that computes attention, and its tiles.
        ffn_chunk_size: Tokens of a device per row of a chunk of the MLP and of attention's projections; -1 for all.
        dropout: Random masks of the layer; None for no dropout.
    """

    arch_config: ArchConfig
    mask: AttentionMask
    sharding: ShardingContext = field(default_factory=ShardingContext)
    kv_cache: KVCache | None = None
    encoder_output: EncoderOutput | None = None
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)
    ffn_chunk_size: int = -1
    dropout: LayerDropout | None = None

    def drop_residual(self, x: Array, site: Site) -> Array:
        """Drop elements of the output [B, T, D] of attention or MLP, if there is dropout."""
        return x if self.dropout is None else self.dropout.drop_residual(x, site)
