"""The coordination service of `jax.distributed` as a ProcessGroup.

The client is private in JAX. This module uses its methods in jaxlib 0.10.
"""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from prepcli.core.errors import PrepError
from prepcli.core.worker_thread import exit_now
from trainer.distributed.hosts import process_place
from trainer.distributed.jax_internals import distributed_state
from trainer.distributed.runtime_errors import RuntimeErrors

KEY_PREFIX = "prep"
# A day is longer than any wait for a live process. The watchdog ends waits for lost ones.
WAIT_MS = 24 * 60 * 60 * 1000


class ConnectionBrokenError(PrepError):
    """The coordination service does not answer, or reports a lost process."""


class CoordinatedProcesses:
    """ProcessGroup of the processes that `jax.distributed.initialize` connected.

    Attributes:
        index: Index of this process.
        count: Number of processes.
        errors: Fatal errors of the runtime.
        is_owner: Whether prep connected the processes. False if the calling program did.
        places: Host and process id of this process and of other known ones, by index.
    """

    def __init__(
        self, errors: RuntimeErrors | None = None, places: Mapping[int, str] | None = None
    ) -> None:
        self.errors = errors or RuntimeErrors()
        self.is_owner = errors is not None
        state: Any = distributed_state()
        self.index: int = state.process_id
        self.count: int = state.num_processes
        self.places: Mapping[int, str] = {**(places or {}), self.index: process_place()}
        self._client = state.client
        # The prefix must be equal on all processes, so each process counts its own groups under its
        # own key.
        start = self._client.key_value_increment(f"{KEY_PREFIX}/starts/{self.index}", 1)
        # Keys of an earlier group of the same processes must not answer for this one.
        self._prefix = f"{KEY_PREFIX}/{start}"
        self._calls: Counter[str] = Counter()

    def barrier(self, name: str) -> None:
        """Wait until all processes have called it. Raise PrepError if one of them is lost."""
        key = self._next_key("barrier", name)
        with _convert_jax_errors(name):
            self._client.wait_at_barrier(key, WAIT_MS)

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes by index on process 0, and an empty list elsewhere."""
        key = self._next_key("gather", name)
        with _convert_jax_errors(name):
            self._client.key_value_set(f"{key}/{self.index}", text)
            if self.index:
                return []
            texts = [
                self._client.blocking_key_value_get(f"{key}/{index}", WAIT_MS)
                for index in range(self.count)
            ]
            # The service keeps all keys in the memory of process 0 until they are deleted.
            self._client.key_value_delete(f"{key}/")
            return texts

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of process 0 on all processes."""
        key = self._next_key("broadcast", name)
        with _convert_jax_errors(name):
            if self.index == 0:
                self._client.key_value_set(key, text)
                return text
            return self._client.blocking_key_value_get(key, WAIT_MS)

    def publish(self, key: str, text: str) -> None:
        """Store a text for all processes, in place of an earlier one.

        Raises:
            ConnectionBrokenError: Process 0 does not answer.
        """
        with _convert_jax_errors(key):
            self._client.key_value_set(f"{self._prefix}/{key}", text, allow_overwrite=True)

    def read(self, key: str) -> str | None:
        """Return the published text of a key. None if there is none.

        Raises:
            ConnectionBrokenError: Process 0 does not answer.
        """
        with _convert_jax_errors(key):
            try:
                return self._client.key_value_try_get(f"{self._prefix}/{key}")
            except jax.errors.JaxRuntimeError as error:
                # jaxlib raises one exception type for all status codes. The code is in the message.
                if "NOT_FOUND" in str(error):
                    return None
                raise

    def read_by_index(self, key: str) -> dict[int, str]:
        """Return the texts that processes published as `KEY/INDEX`, by index.

        Raises:
            ConnectionBrokenError: Process 0 does not answer.
        """
        with _convert_jax_errors(key):
            texts: list[tuple[str, str]] = self._client.key_value_dir_get(f"{self._prefix}/{key}/")
        return {int(name.rpartition("/")[2]): text for name, text in texts}

    def disconnect(self) -> None:
        """Disconnect together with the other processes, and wait until all have."""
        jax.distributed.shutdown()

    def exit_without_disconnecting(self, code: int) -> None:
        """Make the interpreter exit with a code before JAX's exit handlers, which wait for the other processes."""
        # Exit handlers run in reverse order, so this one runs before JAX's, and `exit_now` skips them.
        atexit.register(exit_now, code)

    def _next_key(self, kind: str, name: str) -> str:
        """Return a key that no earlier call has used."""
        key = f"{self._prefix}/{kind}/{name}"
        self._calls[key] += 1
        return f"{key}/{self._calls[key]}"


@contextmanager
def _convert_jax_errors(name: str) -> Iterator[None]:
    """Raise ConnectionBrokenError in place of the errors of jax in the block."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise _lost_error(name, error) from error


def _lost_error(name: str, error: Exception) -> ConnectionBrokenError:
    return ConnectionBrokenError(
        f"the processes lost each other at {name!r}", str(error).partition("\n")[0]
    )
