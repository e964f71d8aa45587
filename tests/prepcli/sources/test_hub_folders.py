"""Tests of the errors of `HubFolder` that need no hub."""

from __future__ import annotations

import pytest
from huggingface_hub.hf_api import RepoSibling

from prepcli.core.errors import PrepError
from prepcli.sources.detect import Kind
from prepcli.sources.folders import Access, HubFolder
from prepcli.stores.byte_ranges import DEFAULT_RETRY_POLICY
from prepcli.stores.hub import HubListing


@pytest.mark.parametrize(
    ("kind", "weights", "commit", "why"),
    [
        ("safetensors", "model.safetensors", None, "the hub did not report a commit"),
        ("torch", "pytorch_model.bin", "abc123", "the hub lists no size of pytorch_model.bin"),
    ],
)
def test_stream_error_names_missing_commit_or_size(
    kind: Kind, weights: str, commit: str | None, why: str
):
    files = {weights: RepoSibling(weights)}
    listing = HubListing("owner/name", None, commit, files, DEFAULT_RETRY_POLICY)
    with pytest.raises(PrepError, match="cannot stream owner/name") as caught:
        HubFolder(listing, Access(stream=True)).fetch(kind)
    assert caught.value.why == why
