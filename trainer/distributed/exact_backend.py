"""The start of XLA without fused multiply-add, for results that do not depend on the shapes of a program.

LLVM fuses one of the products in `a * b + c * d` with the sum, and its choice depends on the shapes of a program. No
option of a compilation prevents it: XLA's CPU backend chooses its instructions when it starts, from `XLA_FLAGS`, which
it reads once per process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from prepcli.core.errors import PrepError
from trainer.distributed.devices import all_devices
from trainer.distributed.jax_internals import backends_are_initialized

FLAGS = "XLA_FLAGS"
MAX_ISA = "--xla_cpu_max_isa"
# AVX is the newest x86 instruction set without fused multiply-add, which came with AVX2.
WITHOUT_FUSED = f"{MAX_ISA}=AVX"
X86_MACHINES = ("x86_64", "AMD64")
# For one value LLVM emits no vector instructions and no fused operation, so the probe needs many.
PROBE_SIZE = 4096

# The flags that XLA has read, if `start_exact_backend` has started it.
_flags_of_start: str | None = None


def start_exact_backend() -> None:
    """Start the devices of this process so that XLA's code for x86 processors rounds each product.

    `XLA_FLAGS` has its earlier value afterwards. Devices in use stay unchanged.

    Raises:
        PrepError: They are in use already, and fuse products and sums.
    """
    if platform.machine() not in X86_MACHINES:
        return
    was_in_use = backends_are_initialized()
    if not was_in_use:
        with _flags_without_fused():
            all_devices()
    if jax.default_backend() == "cpu" and fuses_multiply_add():
        raise _fused_error(was_in_use)


def xla_flags() -> str:
    """Return the flags in force: the flags set by `start_exact_backend`, or the environment's."""
    if _flags_of_start is None:
        return os.environ.get(FLAGS, "")
    return _flags_of_start


@contextmanager
def _flags_without_fused() -> Iterator[None]:
    """Disable fused multiply-add while XLA starts, unless the user's XLA_FLAGS already choose the instruction set."""
    global _flags_of_start
    flags = os.environ.get(FLAGS)
    started = flags or ""
    if MAX_ISA not in started:
        started = f"{started} {WITHOUT_FUSED}".strip()
    os.environ[FLAGS] = started
    try:
        yield
    finally:
        if flags is None:
            del os.environ[FLAGS]
        else:
            os.environ[FLAGS] = flags
    _flags_of_start = started


@cache
def fuses_multiply_add() -> bool:
    """Return whether XLA fuses products and sums on this process's CPU, by computing `a * b + c`."""
    a, b, c = np.random.default_rng(0).standard_normal((3, PROBE_SIZE)).astype(np.float32)
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        options = {"xla_backend_optimization_level": 3}
        computed = jax.jit(_multiply_add, compiler_options=options)(a, b, c)
    # NumPy rounds the product and then the sum. A fused operation rounds once, so some of the 4096
    # random results differ.
    return not np.array_equal(np.asarray(computed), a * b + c)


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.multiply(a, b) + c


def _fused_error(was_in_use: bool) -> PrepError:
    what = "exact results are not possible in this process"
    hint = f'`{FLAGS}={WITHOUT_FUSED}` before Python starts, or the setting `reduction = "fast"`'
    if was_in_use:
        why = "JAX was used before, and XLA fuses products and sums: it reads its flags at the first use"
        return PrepError(what, why, f"call prep before other code uses JAX, or {hint}")
    return PrepError(what, f"XLA fuses products and sums with `{FLAGS}={xla_flags()}`", hint)
