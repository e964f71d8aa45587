"""Uploads: URLs in `--out`, local folders, and the record of uploaded files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.console.observer import SilentObserver
from prepcli.engine.digest import digest
from prepcli.errors import PrepError
from prepcli.execution.uploads import UploadRequest, _uploaded_names, make_and_upload, parse_out_url
from prepcli.formats.manifest import encode_manifest
from prepcli.remote.object_store import ObjectStoreUrl
from prepcli.remote.remote_files import RemoteFile
from tests.helpers.object_server import serve_objects

pytestmark = pytest.mark.waits


def test_parse_out_url_accepts_a_path():
    assert parse_out_url(Path("gs://bucket/a/b")) == ObjectStoreUrl("gs", "bucket", "a/b")
    assert parse_out_url(Path("s3://bucket/a/")) == ObjectStoreUrl("s3", "bucket", "a")
    assert [
        parse_out_url(path) for path in (None, Path("a/b"), Path("/a/b"), Path("a:b"), Path("../a"))
    ] == [None] * 5
    with pytest.raises(PrepError) as caught:
        parse_out_url(Path("abfs://bucket/a"))
    assert caught.value.code == 2


def test_upload_request_names_its_local_folder():
    request = UploadRequest(ObjectStoreUrl("gs", "bucket", "a/init"), False, False, False)
    assert (request.local_folder, request.marks_path) == (
        Path("init.upload/init"),
        Path("init.upload/uploaded.jsonl"),
    )
    assert UploadRequest(
        ObjectStoreUrl("gs", "bucket", ""), False, False, False
    ).local_folder == Path("bucket.upload/bucket")


def test_uploaded_names_require_unchanged_remote_files(tmp_path: Path):
    remote_files = [
        RemoteFile("a", 1, "etag:1"),
        RemoteFile("b", 1, "etag:2"),
        RemoteFile("c", 1, "etag:3"),
    ]
    marks = [
        ["p", "a", 1, "etag:1"],
        ["p", "b", 1, "etag:0"],
        ["q", "c", 1, "etag:3"],
        ["p", "d", 1, "etag:4"],
    ]
    path = tmp_path / "uploaded.jsonl"
    assert _uploaded_names(path, "p", remote_files) == set()
    path.write_text("".join(json.dumps(mark) + "\n" for mark in marks) + '["p", "c", 1, "et')
    assert _uploaded_names(path, "p", remote_files) == {"a"}


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


MINE = manifest_of("mine")


@pytest.mark.parametrize(
    ("objects", "overwrite", "error"),
    [
        ({"prep-manifest.json": manifest_of("other")}, False, "already exists"),
        ({"prep-manifest.json": b"{"}, False, "already exists"),
        ({"data": b"1"}, False, "is something else"),
        ({"data": b"1"}, True, "is something else"),
        ({"prep-manifest.json": manifest_of("other")}, True, ""),
        ({"prep-manifest.json": MINE, "whole": b"1"}, False, ""),
    ],
)
def test_upload_detects_files_written_by_others_meanwhile(
    objects: dict[str, bytes],
    overwrite: bool,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    request = UploadRequest(
        ObjectStoreUrl("gs", "bucket", "out"), dry_run=False, overwrite=overwrite, restart=False
    )
    with serve_objects() as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)

        def make_output(folder: Path, dry_run: bool) -> Any:
            folder.mkdir(parents=True)
            (folder / "prep-manifest.json").write_bytes(MINE)
            for name, content in objects.items():
                store.store(f"bucket/out/{name}", content)
            return SimpleNamespace(plan_digest="mine")

        if error:
            with pytest.raises(PrepError, match=error):
                make_and_upload(request, False, observer=SilentObserver(), make_output=make_output)
            assert store.objects_below("bucket/out/") == objects
            assert request.local_folder.is_dir()
        else:
            make_and_upload(request, False, observer=SilentObserver(), make_output=make_output)
            uploaded = store.objects_below("bucket/out/")
            assert uploaded["prep-manifest.json"] == MINE
            assert ("whole" in uploaded) == ("whole" in objects), (
                "a complete output is left as it is"
            )


@pytest.mark.parametrize("stored", [b"{}", b"{ }", b"[]", None])
def test_damaged_upload_is_not_already_done(
    stored: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    request = UploadRequest(
        ObjectStoreUrl("gs", "bucket", "out"), dry_run=False, overwrite=False, restart=False
    )
    objects = {"bucket/out/prep-manifest.json": manifest_of("mine", {"config.json": b"{}"})}
    if stored is not None:
        objects["bucket/out/config.json"] = stored
    with serve_objects(objects) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)

        def make_output(folder: Path, dry_run: bool) -> Any:
            assert dry_run
            return SimpleNamespace(plan_digest="mine")

        if stored == b"{}":
            _, is_uploaded_already = make_and_upload(
                request, False, observer=SilentObserver(), make_output=make_output
            )
            assert is_uploaded_already
        else:
            with pytest.raises(
                PrepError, match="this command created it, but its files are damaged"
            ):
                make_and_upload(request, False, observer=SilentObserver(), make_output=make_output)
