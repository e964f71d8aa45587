"""The store and the bucket of tests about single objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prepcli.stores.addresses import parse_url
from prepcli.stores.object_store import Bucket
from tests.helpers.object_server import FakeObjectStore, use_objects


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    """Serve an empty store. The environment names it."""
    with use_objects(monkeypatch) as fake:
        yield fake


@pytest.fixture(params=["gs", "s3"])
def bucket(store: FakeObjectStore, request: pytest.FixtureRequest) -> Bucket:
    """Return the client of a URL in the store, by each protocol."""
    return Bucket(parse_url(f"{request.param}://bucket/out"))
