"""Attention kernels by name. Each computes softmax(q k^T * scale) v for the keys that a mask makes visible."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax import Array

from trainer.models.architecture import ArchConfig
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.blockwise import blockwise_attention
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.kernels.reference import reference_attention

AttentionKernel = Callable[[Array, KV, ArchConfig, AttentionMask, AttentionOptions], Array]
KERNELS: Mapping[str, AttentionKernel] = {"reference": reference_attention, "blockwise": blockwise_attention}
