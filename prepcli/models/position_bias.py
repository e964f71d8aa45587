"""Biases of attention scores by the positions of query and key: T5's learned table, and ALiBi. No I/O, no jax."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.errors import invalid_config_error

# Longer than any sequence. Bounds the memory that an invalid config can ask for.
MAX_RELATIVE_DISTANCE = 1 << 20


@dataclass(frozen=True, slots=True)
class RelativePositionBias:
    """T5's bias of attention scores by relative position (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, 2.1).

    Half of the buckets hold one distance each. The rest grow logarithmically up to `max_distance`.

    Attributes:
        num_buckets: Number of biases per head.
        max_distance: Distance from which on all keys share the last bucket.
        bidirectional: Whether keys after the query have half of the buckets (encoder), or none
            (decoder).

    Raises:
        PrepError: A size is out of range.
    """

    num_buckets: int
    max_distance: int
    bidirectional: bool

    def __post_init__(self) -> None:
        exact = self.num_buckets // 2
        if self.num_buckets < 4 or not exact < self.max_distance <= MAX_RELATIVE_DISTANCE:
            why = f"it has {self.num_buckets} buckets of distances up to {self.max_distance}"
            allowed = (
                f"4 or more buckets, and a distance from {exact + 1} to {MAX_RELATIVE_DISTANCE:,}"
            )
            raise invalid_config_error(f"{why}; a relative position bias needs {allowed}")


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (Press et al. 2022, https://arxiv.org/abs/2108.12409, section 3).

    The scores of head h get the bias slope_h * (key position - query position).

    Attributes:
        slopes: Slope of each head.
    """

    slopes: tuple[float, ...]


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: 2^(-8 i / n) for i = 1 to n, where n is the number of heads.

    If n is not a power of two, the slopes of the next lower power come first. The odd ones of the next
    higher power follow.
    """
    # E.g. 3 heads: 2^-4 and 2^-8 of n = 2, and 2^-2 of n = 4.
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    between = [2.0 ** (-8 * i / (2 * lower)) for i in range(1, 2 * lower, 2)]
    return (*slopes, *between[: num_heads - lower])
