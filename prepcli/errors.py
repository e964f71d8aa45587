"""The one error type that reaches a user, and the exit codes, as the trainer raises them too."""

from __future__ import annotations

from trainer.models.errors import FAILED, INTERRUPTED, OK, STOPPED, USAGE, PrepError, usage_error

__all__ = ["FAILED", "INTERRUPTED", "OK", "STOPPED", "USAGE", "PrepError", "usage_error"]
