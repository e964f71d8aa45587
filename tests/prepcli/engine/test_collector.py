"""The pause of the garbage collector."""

from __future__ import annotations

import gc

import pytest

from prepcli.engine.budget import collector_paused


def fail_while_paused() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise ValueError("header")


def test_collector_runs_again_after_an_error():
    with pytest.raises(ValueError, match="header"):
        fail_while_paused()
    assert gc.isenabled()


def test_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
