"""Fatal errors of JAX's coordination service, reported to Python before they abort the process.

A thread of the runtime learns that process 0 is gone, or that the service lost a process, and aborts this process with
its own log. `jax.distributed.initialize` has no hook for it. jaxlib's client has one, `missed_heartbeat_callback`,
but jaxlib 0.10 cannot convert the callback's argument: it throws `std::bad_cast`, which terminates the process.
Therefore both the callback and the terminate handler of the C++ runtime call `RuntimeErrors`. Without the hook, JAX
aborts the process.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

CLIENT_FACTORY = "get_distributed_runtime_client"
CALLBACK = "missed_heartbeat_callback"
# The mangled name of std::set_terminate(void (*)()) in libstdc++.
SET_TERMINATE = "_ZSt13set_terminatePFvvE"
# The watchdog ends the process within this time, or JAX aborts it.
DECISION_S = 30.0


class RuntimeErrors:
    """Fatal errors of the runtime of this process.

    Attributes:
        reported: Set after a fatal error. The thread that reports it waits meanwhile.
    """

    def __init__(self) -> None:
        self.reported = threading.Event()
        self._previous_handler: int | None = None
        # ctypes frees the C function with this object, so it must live as long as the process.
        self._handler = ctypes.CFUNCTYPE(None)(self._on_terminate)

    @contextmanager
    def intercept_client_errors(self) -> Iterator[None]:
        """Report fatal errors of the distributed clients that JAX creates inside the context.

        The errors are reported as long as the client exists, also after the context.
        """
        factory: Callable[..., Any] | None = getattr(_jax, CLIENT_FACTORY, None)
        # The docstring of a C++ function has its signature. A jaxlib without the option gets no
        # hook.
        if factory is None or CALLBACK not in (factory.__doc__ or ""):
            yield
            return
        self._set_terminate_handler()
        setattr(_jax, CLIENT_FACTORY, self._add_error_callback(factory))
        try:
            yield
        finally:
            setattr(_jax, CLIENT_FACTORY, factory)

    def _add_error_callback(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Make each client of the factory report its errors to this object."""

        def create_client(*args: Any, **options: Any) -> Any:
            return factory(
                *args, **{**options, CALLBACK: self._on_error, "shutdown_on_destruction": False}
            )

        return create_client

    def _set_terminate_handler(self) -> None:
        """Make the C++ runtime call `_on_terminate` before it ends the process."""
        # With another C++ library there is no hook, and JAX aborts the process.
        with suppress(OSError, AttributeError):
            set_terminate = getattr(ctypes.CDLL("libstdc++.so.6"), SET_TERMINATE)
            set_terminate.restype = ctypes.c_void_p
            self._previous_handler = set_terminate(self._handler)

    def _on_error(self, *_: object) -> None:
        """Report the error, and wait for the decision of the watchdog."""
        self.reported.set()
        # JAX aborts the process when this returns. Until then the watchdog can end it with a
        # message.
        time.sleep(DECISION_S)

    def _on_terminate(self) -> None:
        """Report the error. If nothing ends the process, end it as the previous handler does."""
        self._on_error()
        if self._previous_handler:
            ctypes.CFUNCTYPE(None)(self._previous_handler)()
