"""Functions of arrays that are compiled ahead of their calls, so that a signal ends the wait for the compiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from prepcli.core.worker_thread import run_abandonable


class CompiledFunction:
    """A function of arrays, compiled once per combination of shapes, dtypes, shardings and static arguments.

    Attributes:
        compile_s: Seconds of compilation so far.
    """

    def __init__(self, jitted: Any) -> None:
        """Take a function of `jax.jit`."""
        self._jitted = jitted
        self._executables: dict[Any, Callable[..., Any]] = {}
        self.compile_s = 0.0

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """Call the function, after its compilation for the first arguments of their kind."""
        leaves, structure = jax.tree.flatten(arrays)
        # `compile` makes an executable for exactly these arguments. It rejects other shapes and shardings,
        # where `jit` would silently compile again.
        key = (
            structure,
            *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves),
            *static.items(),
        )
        if key not in self._executables:
            # Compile before the first call, to count its time without the execution.
            started_at = time.monotonic()
            lowered = self._jitted.lower(*arrays, **static)
            # XLA compiles for minutes in one call, during which the main thread could handle no signal.
            self._executables[key] = run_abandonable(lowered.compile)
            self.compile_s += time.monotonic() - started_at
        return self._executables[key](*arrays)
