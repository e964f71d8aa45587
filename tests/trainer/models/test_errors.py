"""The error type and its exit codes."""

from __future__ import annotations

import pickle

import prepcli.errors
import trainer.models.errors
from trainer.models.errors import FAILED, USAGE, PrepError, usage_error


def test_prepcli_reexports_error_type():
    assert prepcli.errors.PrepError is trainer.models.errors.PrepError
    assert prepcli.errors.usage_error is trainer.models.errors.usage_error


def test_prep_error_text_omits_empty_parts():
    assert str(PrepError("x is cut short", hint="download it again")) == "x is cut short - download it again"


def test_prep_errors_have_failed_or_usage_exit_code():
    assert PrepError("x").code == FAILED
    assert usage_error("x", "y", "z").code == USAGE


def test_prep_error_survives_pickling():
    error = pickle.loads(pickle.dumps(usage_error("what", why="why", hint="hint")))
    assert (error.what, error.why, error.hint, error.code) == ("what", "why", "hint", USAGE)


def test_prep_error_is_hashable():
    assert len({PrepError("x"), PrepError("x")}) == 2
