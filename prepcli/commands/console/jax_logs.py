"""The log messages of jax."""

from __future__ import annotations

import logging
import os

from prepcli.core.observer import SLABS, CommandObserver, Observer


def silence_jax(observer: Observer) -> None:
    """Hide the log messages of jax, such as warnings about missing accelerators, unless a command has `-vv`."""
    is_verbose = isinstance(observer, CommandObserver) and observer.level >= SLABS
    # The C++ part of jax reads this variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if is_verbose else "3")
    logging.getLogger("jax").setLevel(logging.INFO if is_verbose else logging.ERROR)
