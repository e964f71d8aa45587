"""Compiled steps that the tests of training runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.shared_steps import share_steps


@pytest.fixture(scope="package", autouse=True)
def shared_steps() -> Iterator[None]:
    """Compile the steps of runs with equal setups once."""
    with share_steps():
        yield
