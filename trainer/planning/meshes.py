"""The meshes of a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prepcli.models.mesh import MESH_AXES, parse_mesh
from prepcli.models.rules import Rules, activation_rules


def meshes_of(num_devices: int, rules: Rules) -> Iterator[str]:
    """Yield the meshes of a number of devices. Meshes with sp are left out if no rule splits tokens over sp."""
    splits_seq = any("sp" in choice for choice in activation_rules(rules)["seq"])
    # If no rule splits tokens over sp, its devices would repeat the same work.
    axes = MESH_AXES if splits_seq else MESH_AXES[:3]
    for sizes in _factorizations(num_devices, len(axes)):
        yield str(parse_mesh(",".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers with the product `number`, e.g. (1, 4), (2, 2), (4, 1)."""
    if count == 1:
        yield (number,)
        return
    for divisor in (d for d in range(1, math.isqrt(number) + 1) if number % d == 0):
        # The set drops the second root of a square: 2 and 2 for 4.
        for first in sorted({divisor, number // divisor}):
            yield from ((first, *rest) for rest in _factorizations(number // first, count - 1))
