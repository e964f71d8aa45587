"""The coordination service of `jax.distributed` as a ProcessGroup. Only this module uses JAX's private client."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from jax._src import distributed

from trainer.models.errors import PrepError

KEY_PREFIX = "prep"
WAIT_MS = 24 * 60 * 60 * 1000  # longer than any wait for a live process


class CoordinatedProcesses:
    """ProcessGroup of the processes that `jax.distributed.initialize` connected.

    Attributes:
        index: Index of this process.
        count: Number of processes.
    """

    def __init__(self) -> None:
        state: Any = distributed.global_state
        self.index: int = state.process_id
        self.count: int = state.num_processes
        self._client = state.client
        start = self._client.key_value_increment(f"{KEY_PREFIX}/starts/{self.index}", 1)
        self._prefix = f"{KEY_PREFIX}/{start}"  # another one for each group of the same processes
        self._calls: Counter[str] = Counter()

    def barrier(self, name: str) -> None:
        """Wait until all processes have called it; raise PrepError if one of them is lost."""
        key = self._next_key("barrier", name)
        try:
            self._client.wait_at_barrier(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            raise _lost_error(name, error) from error

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes, by index, on process 0; an empty list on all others."""
        key = self._next_key("gather", name)
        try:
            self._client.key_value_set(f"{key}/{self.index}", text)
            if self.index:
                return []
            return [self._client.blocking_key_value_get(f"{key}/{index}", WAIT_MS) for index in range(self.count)]
        except jax.errors.JaxRuntimeError as error:
            raise _lost_error(name, error) from error

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of process 0 on all processes."""
        key = self._next_key("broadcast", name)
        try:
            if self.index == 0:
                self._client.key_value_set(key, text)
                return text
            return self._client.blocking_key_value_get(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            raise _lost_error(name, error) from error

    def _next_key(self, kind: str, name: str) -> str:
        """Return a key that no earlier call has used."""
        key = f"{self._prefix}/{kind}/{name}"
        self._calls[key] += 1
        return f"{key}/{self._calls[key]}"


def _lost_error(name: str, error: Exception) -> PrepError:
    return PrepError(f"the processes lost each other at {name!r}", str(error).partition("\n")[0])
