"""Groups of layers with different parameters, and the order in which layers are scanned. Pure.

In a model with both dense and MoE layers the MLPs of each group are stacked: `dense_layers.mlp.up.weight` has one
entry per dense layer, and `sparse_layers.mlp.up.weight` one per MoE layer. In the same way `attention_layers` and
`mixer_layers` have the attention and the recurrent mixers of a model with both. All other parameters are in `layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from prepcli.algebra.axis_map import LAYERS


class LayerSchedule(NamedTuple):
    """The order of a scan: some first layers, then periods of layers, then the layers of an incomplete period.

    Attributes:
        num_first: Layers before the first period.
        period: Layers of a period.
        num_periods: Number of whole periods.
    """

    num_first: int
    period: int
    num_periods: int

    @property
    def num_scanned(self) -> int:
        """Number of layers in whole periods."""
        return self.period * self.num_periods

    @property
    def stop(self) -> int:
        """Number of the layer after the last whole period."""
        return self.num_first + self.num_scanned


def layer_schedule(kinds: Sequence[object]) -> LayerSchedule:
    """Return the schedule with the fewest different layers to compile.

    The first layers are none, or those of the same kind as the first layer. For example the kinds of 3 dense
    layers and 58 MoE layers are compiled as 3 single layers and one period of 1 layer.

    Args:
        kinds: The kind of each layer. Layers of equal kinds run the same computation.
    """
    num_leading = 0
    while num_leading < len(kinds) and kinds[num_leading] == kinds[0]:
        num_leading += 1
    schedules = [_schedule_after(kinds, num_first) for num_first in (0, num_leading)]
    return min(schedules, key=lambda schedule: _num_compiled(schedule, len(kinds)))


def _schedule_after(kinds: Sequence[object], num_first: int) -> LayerSchedule:
    """Return a schedule with `num_first` single layers before the periods."""
    period = repeating_period(kinds[num_first:])
    return LayerSchedule(num_first, period, (len(kinds) - num_first) // period)


def _num_compiled(schedule: LayerSchedule, num_layers: int) -> int:
    """Return the number of layers that a schedule compiles."""
    # A single period is no loop.
    if schedule.num_periods < 2:
        return num_layers
    return num_layers - schedule.num_scanned + schedule.period


def repeating_period(kinds: Sequence[object]) -> int:
    """Return the period of a pattern, in layers. The last period may be incomplete."""
    # A pattern with period n equals itself shifted by n, e.g. [4, 0, 4, 0, 4]: its shift by 2 is
    # [4, 0, 4], the first 3 kinds. The shift by all kinds is empty, so the loop finds one.
    period = 1
    while kinds[period:] != kinds[: len(kinds) - period]:
        period += 1
    return period


def group_indices(
    num_layers: int, groups: Mapping[str, Collection[int]]
) -> tuple[dict[str, int], ...]:
    """Return for each layer its groups, and its index in each of them.

    With 3 layers and layer 0 in `dense_layers`, layer 2 is layer 2 of `layers` and layer 1 of `sparse_layers`.

    Args:
        num_layers: Number of layers.
        groups: Groups of some layers -> numbers of their layers. All layers are in `layers`.
    """
    counts = dict.fromkeys(groups, 0)
    group_members = {group: frozenset(members) for group, members in groups.items()}
    indices: list[dict[str, int]] = []
    for layer in range(num_layers):
        layer_indices = {LAYERS: layer}
        for group, members in group_members.items():
            if layer in members:
                layer_indices[group] = counts[group]
                counts[group] += 1
        indices.append(layer_indices)
    return tuple(indices)
