"""The log messages of jax."""

from __future__ import annotations

import logging
import os

from prepcli.console.ui import SLABS, Ui


def silence_jax(ui: Ui) -> None:
    """Hide the log messages of jax, such as warnings about missing accelerators, unless `-vv` is set."""
    is_verbose = ui.level >= SLABS
    # The C++ part of jax reads this variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if is_verbose else "3")
    logging.getLogger("jax").setLevel(logging.INFO if is_verbose else logging.ERROR)
