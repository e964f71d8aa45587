"""URLs in `--out`."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.output_urls import parse_out_url
from prepcli.stores.addresses import ObjectStoreUrl


def test_parse_out_url_accepts_a_path():
    assert parse_out_url(Path("gs://bucket/a/b")) == ObjectStoreUrl("gs", "bucket", "a/b")
    assert parse_out_url(Path("s3://bucket/a/")) == ObjectStoreUrl("s3", "bucket", "a")
    assert [
        parse_out_url(path) for path in (None, Path("a/b"), Path("/a/b"), Path("a:b"), Path("../a"))
    ] == [None] * 5
    with pytest.raises(PrepError) as caught:
        parse_out_url(Path("abfs://bucket/a"))
    assert caught.value.code == 2
