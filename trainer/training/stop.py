"""The step after which all processes of a job stop, whichever of them received the signal.

With several processes each batch carries the stop signal of each process, in one int32 per device. The training step
returns the largest, so that all processes read the same signal at the same step, without an exchange of their own.
Between the batches of an evaluation and the tokens of a sample, `agree` exchanges the signals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from trainer.distributed.sharding import ShardingContext

# Name of the entry in batches and in metrics.
STOP = "stop"
# The index of a reason is its value in a batch. Among several, the largest one wins.
STOP_REASONS = ("", "SIGUSR1", "SIGTERM", "SIGINT")


class EventStoppedError(Exception):
    """A stop signal ended an event between two steps, such as an evaluation, before it was complete."""


class StopSignals:
    """Stop signals of all processes of a run."""

    def __init__(self, poll_stop_reason: Callable[[], str], sharding: ShardingContext) -> None:
        """Create the signals of a run.

        Args:
            poll_stop_reason: Returns the name of the signal that this process received. Empty if
                there is none.
            sharding: Devices of the run.
        """
        self._poll = poll_stop_reason
        self._agreed = ""
        self._sharding: NamedSharding | None = None
        self._largest: Callable[[Array], Array] | None = None
        self._shape = (sharding.num_devices,)
        if sharding.device_mesh is not None and sharding.has_other_processes:
            self._sharding = NamedSharding(
                sharding.device_mesh, PartitionSpec(sharding.device_mesh.axis_names)
            )
            self._largest = jax.jit(jnp.max, out_shardings=sharding.replicated_sharding())

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of each array of `batch_entry`, by name. Empty in a run of one process."""
        if self._sharding is None:
            return {}
        return {STOP: jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)}

    def batch_entry(self) -> dict[str, Array]:
        """Return the entry of the next batch: the signal of this process on each of its devices."""
        if self._sharding is None:
            return {}
        # One int32 per device: shape [1] on each of n devices, [n] in total.
        value = np.full(1, STOP_REASONS.index(self._poll()), np.int32)
        return {STOP: jax.make_array_from_callback(self._shape, self._sharding, lambda _: value)}

    def update_from_metrics(self, metrics: Mapping[str, Array]) -> None:
        """Store the strongest signal of all processes, from the metrics of a step."""
        if STOP in metrics:
            self._update(metrics[STOP])

    def agree(self) -> str:
        """Exchange the signals of all processes, and return the strongest one. All processes call it together."""
        if self._largest is not None:
            self._update(self._largest(self.batch_entry()[STOP]))
        return self.reason()

    def _update(self, largest: Array) -> None:
        # The maximum over all devices is equal in all processes, so they stop at the same point. A
        # process that stopped alone would leave the next collectives waiting.
        self._agreed = max(self._agreed, STOP_REASONS[int(largest)], key=STOP_REASONS.index)

    def reason(self) -> str:
        """Return the name of the signal.

        Empty if there is none.
        """
        # With several processes, a local signal counts only after a step has carried it to all of
        # them.
        if self._sharding is None:
            return self._poll()
        return self._agreed
