"""Fatal errors of JAX's coordination service, reported to Python before they abort the process.

A thread of the runtime learns that process 0 is gone, or that the service lost a process, and aborts this process with
a log of its own. `jax.distributed.initialize` has no hook for it. jaxlib's client has one, `missed_heartbeat_callback`,
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

CLIENT_FACTORY, CALLBACK = "get_distributed_runtime_client", "missed_heartbeat_callback"
SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)())
DECISION_S = 30.0  # the watchdog ends the process within this time, or JAX aborts it


class RuntimeErrors:
    """Fatal errors of the runtime of this process.

    Attributes:
        reported: Set after a fatal error. The thread that reports it waits meanwhile.
    """

    def __init__(self) -> None:
        self.reported = threading.Event()
        self._previous_handler: int | None = None
        self._handler = ctypes.CFUNCTYPE(None)(self._on_terminate)  # must live as long as the process

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Intercept the errors of the clients that are created inside the context, for as long as they live."""
        factory: Callable[..., Any] | None = getattr(_jax, CLIENT_FACTORY, None)
        if factory is None or CALLBACK not in (factory.__doc__ or ""):
            yield
            return
        self._set_terminate_handler()
        setattr(_jax, CLIENT_FACTORY, self._with_callback(factory))
        try:
            yield
        finally:
            setattr(_jax, CLIENT_FACTORY, factory)

    def _with_callback(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        def create_client(*args: Any, **options: Any) -> Any:
            return factory(*args, **{**options, CALLBACK: self._on_error, "shutdown_on_destruction": False})

        return create_client

    def _set_terminate_handler(self) -> None:
        with suppress(OSError, AttributeError):  # another C++ library: JAX aborts the process
            set_terminate = getattr(ctypes.CDLL("libstdc++.so.6"), SET_TERMINATE)
            set_terminate.restype = ctypes.c_void_p
            self._previous_handler = set_terminate(self._handler)

    def _on_error(self, *_: object) -> None:
        """Report the error, and wait for the decision of the watchdog."""
        self.reported.set()
        time.sleep(DECISION_S)

    def _on_terminate(self) -> None:
        """Report the error; if nothing ends the process, end it as the previous handler does."""
        self._on_error()
        if self._previous_handler:
            ctypes.CFUNCTYPE(None)(self._previous_handler)()
