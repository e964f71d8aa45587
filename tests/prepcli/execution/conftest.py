"""An init and a training state that several modules only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training_states import TrainingState, make_mesh_init, make_state, read_params


@pytest.fixture(scope="session")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an init in float32 for a mesh, with a padded vocabulary."""
    return make_mesh_init(tmp_path_factory.mktemp("start"), "float32")


@pytest.fixture(scope="session")
def state(init: Path) -> TrainingState:
    """Return a training state with the parameters of the init."""
    return make_state(read_params(init), 1)
