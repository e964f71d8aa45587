"""The attention kernel of a run and the sizes of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.models.attention_kernels import KernelSpec, find_kernel


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The way of computing attention. It changes results by rounding only.

    Attributes:
        kernel: One of `KERNEL_NAMES`.
        q_chunk_size: Queries of a tile. -1 means all.
        k_chunk_size: Keys of a tile. -1 means all.

    Raises:
        UsageError: `kernel` is unknown.
    """

    kernel: str = "reference"
    q_chunk_size: int = 512
    k_chunk_size: int = 512

    def __post_init__(self) -> None:
        """Check the name of the kernel."""
        find_kernel(self.kernel)

    @property
    def spec(self) -> KernelSpec:
        """The capabilities of the kernel."""
        return find_kernel(self.kernel)
