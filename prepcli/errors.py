"""The errors of all functions, and the exit codes of commands."""

from __future__ import annotations

from trainer.models.errors import (
    FAILED,
    GET_AGAIN_HINT,
    INTERRUPTED,
    OK,
    RERUN_HINT,
    RESUME_HINT,
    STOPPED,
    USAGE,
    DamagedError,
    OutputExistsError,
    PrepError,
    UsageError,
    invalid_config_error,
    usage_error,
)

__all__ = [
    "FAILED",
    "GET_AGAIN_HINT",
    "INTERRUPTED",
    "OK",
    "RERUN_HINT",
    "RESUME_HINT",
    "STOPPED",
    "USAGE",
    "DamagedError",
    "OutputExistsError",
    "PrepError",
    "UsageError",
    "invalid_config_error",
    "usage_error",
]
