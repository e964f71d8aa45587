"""Checkpoints that several modules share, made once per pytest process."""

from __future__ import annotations

import pytest

from tests.helpers.killing import KillSetup, make_setup


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> KillSetup:
    """Return a model of 72 MB, its init, and undisturbed runs of the commands that convert them."""
    return make_setup(tmp_path_factory.mktemp("kill"))
