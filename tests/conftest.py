"""Settings of pytest for all tests. It also makes pytest import `tests` first, with its environment variables."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers.extras import needs_parity
from tests.helpers.training_folder import make_training_folder

# The time of an example depends on the load of the machine, so no example has a deadline.
settings.register_profile("prep", deadline=None, max_examples=40)
# Before a release: `--hypothesis-profile=release`.
settings.register_profile("release", deadline=None)
settings.load_profile("prep")

# Collections of garbage take a quarter of the time of the imports, and find nothing.
gc.disable()

# Allocations between two garbage collections. At the default of 700, collections take 5 % of the
# time of traces by JAX.
COLLECT_EVERY = 20_000


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a test, with a recipe, a text, a model and its init. It has no access to the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    return tmp_path


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Run torch with one thread in the tests of a module."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one more than CPUs, because tests wait for processes and files."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of modules that compare with packages of the extra `parity`, so that `-m parity` selects them."""
    if needs_parity(item.path):
        item.add_marker("parity")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that wait before all others, so that one worker waits while the others compute.

    The first worker starts with the first tests. At the end of the suite all workers would wait together.
    """
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def pytest_collection_finish() -> None:
    """Collect garbage less often, and never the objects of the imported packages."""
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)
    gc.enable()
