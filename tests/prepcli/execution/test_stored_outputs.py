"""Existing outputs in a bucket: equal plans, and records of their small files."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from prepcli.core.errors import PrepError
from prepcli.engine.digest import digest
from prepcli.execution import stored_outputs
from prepcli.execution.stored_outputs import check_stored_output, has_intact_files, stored_manifest
from prepcli.formats.manifest import encode_manifest
from prepcli.stores.addresses import parse_url
from prepcli.stores.object_store import Bucket
from tests.helpers.object_server import use_objects


def manifest_of(plan: str, files: Mapping[str, bytes] | None = None) -> bytes:
    """Return the manifest of an output with these small files."""
    records = {
        name: {"bytes": len(content), "xxh3": digest(content)}
        for name, content in (files or {}).items()
    }
    content = {
        "kind": "hf",
        "request": "",
        "plan": plan,
        "config": {},
        "tensors": {},
        "prefixed": False,
        "tied": False,
    }
    return encode_manifest({**content, "files": records})


@pytest.mark.parametrize("stored", [b"{}", b"{ }", b"[]", None])
def test_damaged_output_is_not_already_done(stored: bytes | None, monkeypatch: pytest.MonkeyPatch):
    objects = {"bucket/out/prep-manifest.json": manifest_of("mine", {"config.json": b"{}"})}
    if stored is not None:
        objects["bucket/out/config.json"] = stored
    with use_objects(monkeypatch, objects):
        bucket = Bucket(parse_url("gs://bucket/out"))
        files = bucket.list_files()
        manifest = stored_manifest(bucket, files)
        assert manifest is not None
        with pytest.raises(PrepError, match="it was made by another request"):
            check_stored_output(bucket, files, manifest, "other", restart=False)
        if stored == b"{}":
            check_stored_output(bucket, files, manifest, "mine", restart=False)
            with pytest.raises(PrepError, match="this command created it earlier"):
                check_stored_output(bucket, files, manifest, "mine", restart=True)
            return
        with pytest.raises(PrepError, match="this command created it, but its files are damaged"):
            check_stored_output(bucket, files, manifest, "mine", restart=False)


@pytest.mark.parametrize(("stored", "is_intact"), [(b"[]", True), (b"{ }", False)])
def test_large_file_is_compared_by_its_size(
    stored: bytes, is_intact: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stored_outputs, "SMALL_NBYTES", 0)
    objects = {
        "bucket/out/prep-manifest.json": manifest_of("mine", {"tokenizer.json": b"{}"}),
        "bucket/out/tokenizer.json": stored,
    }
    with use_objects(monkeypatch, objects):
        bucket = Bucket(parse_url("gs://bucket/out"))
        files = bucket.list_files()
        manifest = stored_manifest(bucket, files)
        assert manifest is not None
        assert has_intact_files(bucket, files, manifest) == is_intact
