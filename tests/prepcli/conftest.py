"""The working folder of tests that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training_folder import make_training_folder


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a test, with a recipe, a text, a model and its init. It has no access to the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    return tmp_path
