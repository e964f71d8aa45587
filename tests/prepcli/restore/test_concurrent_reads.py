"""A remote checkpoint is read by many requests at once: a store limits the rate of each connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from bench.throttled_store import ThrottledStore, Traffic, serve_throttled
from prepcli.commands.operations.inspect import select_tensors
from prepcli.core.observer import SilentObserver
from prepcli.restore import item_reader, weights_reader
from prepcli.stores import byte_ranges
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

# A block of the checksums of an item.
PIECE_NBYTES = 1 << 20
RATE = float(16 << 20)
DELAY_S = 0.1
# boto3 and Run:ai keep 8 to 10 requests under way.
MIN_CONCURRENT = 12


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of 16 pieces per embedding, and its init."""
    folder = tmp_path_factory.mktemp("bucket")
    make_checkpoint(folder / "model", LLAMA, "float16", vocab_size=1 << 18)
    prep.save_init(folder / "model", out=folder / "item")
    return folder


@contextmanager
def serve_bucket(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThrottledStore]:
    """Serve a folder as `s3://bucket`."""
    with serve_throttled(bucket, RATE, DELAY_S) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("AWS_REGION", "x")
        yield store


def load(bucket: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Load a checkpoint of the bucket, and return the traffic."""
    monkeypatch.setattr(weights_reader, "PIECE_NBYTES", PIECE_NBYTES)
    monkeypatch.setattr(item_reader, "PIECE_NBYTES", PIECE_NBYTES)
    with serve_bucket(bucket, monkeypatch) as store:
        params = prep.load_params(f"s3://bucket/{name}", dtype="keep")
        local = prep.load_params(bucket / name, dtype="keep")
        np.testing.assert_array_equal(params["head"]["weight"], local["head"]["weight"])
        return store.traffic()


@pytest.mark.slow
def test_hf_folder_is_read_by_many_requests_at_once(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(bucket, "model", monkeypatch).max_concurrent >= MIN_CONCURRENT


def test_item_is_read_by_many_requests_at_once(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(bucket, "item", monkeypatch).max_concurrent >= MIN_CONCURRENT


# An output of prep is read once more, and compared with its digests.
@pytest.mark.parametrize(
    ("name", "reads"), slow_except([("model", 1), ("item", 2)], [("model", 1)])
)
def test_statistics_read_several_tensors_at_once(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, name: str, reads: int
):
    with serve_bucket(bucket, monkeypatch) as store:
        remote = select_tensors(f"s3://bucket/{name}", SilentObserver(), {}, stats=True)
        traffic = store.traffic()
    local = select_tensors(str(bucket / name), SilentObserver(), {}, stats=True)
    assert remote.statistics == local.statistics
    assert traffic.repeated_nbytes < traffic.nbytes * (reads - 1) / reads + (1 << 20)
    assert traffic.max_concurrent > byte_ranges.MAX_IN_FLIGHT
