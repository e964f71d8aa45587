"""Checkpoints and compiled steps that the tests of operations share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.planning import object_files
from prepcli.stores import byte_ranges
from tests.helpers.faults import FaultSources, make_sources
from tests.helpers.killing import KillSetup, make_setup, read_files
from tests.helpers.run_cli import Capture, MonkeyPatch
from tests.helpers.shared_steps import share_steps
from tests.helpers.store_sites import OBJECT_NBYTES, StoreSite, make_home, open_site


@pytest.fixture(scope="package", autouse=True)
def shared_steps() -> Iterator[None]:
    """Compile each training step and each decoding step once: tests of other packages replace what they trace."""
    with share_steps():
        yield


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Run each test in a folder of its own. A module that works in a shared folder has a fixture of this name."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> KillSetup:
    """Return a model of 72 MB, its init, and undisturbed runs of the commands that convert them."""
    return make_setup(tmp_path_factory.mktemp("kill"))


@pytest.fixture(scope="session")
def fault_sources(tmp_path_factory: pytest.TempPathFactory) -> FaultSources:
    """Return the sources of the commands in `tests.helpers.faults`, in a folder that tests only copy."""
    return make_sources(tmp_path_factory.mktemp("fault-sources"))


@pytest.fixture
def sources(fault_sources: FaultSources, tmp_path: Path, monkeypatch: MonkeyPatch) -> FaultSources:
    """Copy the sources to the working folder of a test."""
    fault_sources.copy_to(tmp_path)
    return fault_sources


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder with a model `m` of 13 MB and its init `init`. Tests must not change it."""
    folder = make_home(tmp_path_factory.mktemp("home"))
    before = read_files(folder)
    yield folder
    assert read_files(folder) == before


@pytest.fixture
def site(
    home: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> Iterator[StoreSite]:
    """Serve a store with the checkpoints of `home`, and retry at once."""
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    with open_site(home, tmp_path, monkeypatch, capsys) as site:
        yield site


@pytest.fixture
def small_objects(monkeypatch: MonkeyPatch) -> None:
    """Write small objects, so that a tiny model has many of them."""
    monkeypatch.setattr(object_files, "OBJECT_NBYTES", OBJECT_NBYTES)
