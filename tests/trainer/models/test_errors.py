"""The one error type."""

from __future__ import annotations

import pickle

import prepcli.errors
import trainer.models.errors
from trainer.models.errors import FAILED, USAGE, PrepError, usage_error


def test_the_command_line_has_the_same_type():
    assert prepcli.errors.PrepError is trainer.models.errors.PrepError
    assert prepcli.errors.usage_error is trainer.models.errors.usage_error


def test_text_leaves_out_what_is_empty():
    assert str(PrepError("x is cut short", hint="download it again")) == "x is cut short - download it again"


def test_codes():
    assert PrepError("x").code == FAILED
    assert usage_error("x", "y", "z").code == USAGE


def test_an_error_comes_back_from_a_worker_whole():
    back = pickle.loads(pickle.dumps(usage_error("what", why="why", hint="hint")))
    assert (back.what, back.why, back.hint, back.code) == ("what", "why", "hint", USAGE)


def test_an_error_can_be_hashed_as_tracebacks_do():
    assert len({PrepError("x"), PrepError("x")}) == 2
