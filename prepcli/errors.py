"""The errors of all functions, and the exit codes of commands."""

from __future__ import annotations

from trainer.models.errors import (
    FAILED,
    INTERRUPTED,
    OK,
    STOPPED,
    USAGE,
    DamagedError,
    OutputExistsError,
    PrepError,
    UsageError,
    usage_error,
)

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "OK",
    "STOPPED",
    "USAGE",
    "DamagedError",
    "OutputExistsError",
    "PrepError",
    "UsageError",
    "usage_error",
]
