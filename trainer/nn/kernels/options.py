"""The attention kernel of a run and the sizes of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.distributed.sharding import ShardingContext
from trainer.models.errors import usage_error

KERNEL_NAMES = ("reference", "blockwise")
RING_KERNEL = "blockwise"  # the kernel of each device if the mesh splits tokens


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The way of computing attention; it changes results by rounding only.

    Attributes:
        kernel: One of `KERNEL_NAMES`.
        q_chunk_size: Queries of a tile; -1 for all.
        k_chunk_size: Keys of a tile; -1 for all.

    Raises:
        UsageError: `kernel` is unknown.
    """

    kernel: str = "reference"
    q_chunk_size: int = 512
    k_chunk_size: int = 512

    def __post_init__(self) -> None:
        """Check the name of the kernel."""
        if self.kernel not in KERNEL_NAMES:
            what = f"unknown `model.attention_kernel` {self.kernel!r:.60}"
            raise usage_error(what, f"supported: {', '.join(KERNEL_NAMES)}", '`model.attention_kernel = "blockwise"`')


def check_ring_kernel(kernel: str, sharding: ShardingContext) -> None:
    """Check that a kernel can attend to tokens that the mesh splits.

    Raises:
        UsageError: The mesh splits tokens, and the kernel needs those of a whole row.
    """
    if sharding.sequence_parallel_size > 1 and kernel != RING_KERNEL:
        what = f"`model.attention_kernel = {kernel}` does not go with mesh {sharding.mesh}"
        why = f"only {RING_KERNEL} attention passes keys and values between the devices of sp"
        raise usage_error(what, why, f'`model.attention_kernel = "{RING_KERNEL}"`')
