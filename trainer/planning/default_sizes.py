"""The sizes of attention tiles and of head chunks that a recipe does not set, by the kind of the devices. Pure.

On an accelerator large tiles and chunks keep the matrix units busy. On a CPU the scores and the
logits must stay in the caches. `python -m bench.cpu_step` measures a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.models.attention_kernels import CPU, DeviceKind

# Tokens of a tile and of a head chunk.
ACCELERATOR_SIZE = 512
CPU_TILE_SIZE = 64
# For sequences of more than CPU_LONG_LENGTH tokens.
CPU_LONG_TILE_SIZE = 128
CPU_LONG_LENGTH = 1024
# Tokens of a head chunk, over all rows of a micro-batch on a device.
CPU_HEAD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The sizes of the chunks in which a step computes attention and head.

    Attributes:
        queries: Queries of a tile of blockwise attention. -1 for all.
        keys: Keys of a tile of blockwise attention. -1 for all.
        head: Tokens of a device per row with logits in memory at the same time. -1 for all.
    """

    queries: int
    keys: int
    head: int


def default_chunk_sizes(device: DeviceKind, *, length: int, num_rows: int) -> ChunkSizes:
    """Return the sizes for a kind of devices.

    Args:
        device: Kind of the run's devices.
        length: Tokens of the longest sequence.
        num_rows: Sequences of a micro-batch on one device, at least one.
    """
    if device.platform != CPU.platform:
        return ChunkSizes(ACCELERATOR_SIZE, ACCELERATOR_SIZE, head=ACCELERATOR_SIZE)
    tile_size = CPU_TILE_SIZE if length <= CPU_LONG_LENGTH else CPU_LONG_TILE_SIZE
    return ChunkSizes(tile_size, tile_size, head=max(1, CPU_HEAD_TOKENS // num_rows))
