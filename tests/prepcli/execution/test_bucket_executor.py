"""Tests of conversions into an object store by several processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.execution.bucket_executor import BucketExecutor
from prepcli.execution.bucket_publication import BucketPublication
from prepcli.execution.workers import ProcessOptions
from tests.helpers.store_sites import make_home, open_site
from tests.helpers.waiting import MAX_S


@pytest.mark.parametrize("in_turn", [False, True])
def test_processes_that_publish_at_once_write_one_manifest(
    in_turn: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """With `in_turn`, the first process has deleted the state when the second one reads it."""
    home = make_home(tmp_path)
    both_have_written = threading.Barrier(2)
    finish = BucketExecutor._finish  # pyright: ignore[reportPrivateUsage]

    def finish_together(executor: BucketExecutor) -> None:
        both_have_written.wait(MAX_S)
        finish(executor)

    publish = BucketPublication.publish
    turn = threading.Lock()

    def publish_in_turn(publication: BucketPublication) -> None:
        with turn:
            publish(publication)

    def convert(index: int) -> None:
        prep.save_init(
            str(home / "m"),
            out="gs://bucket/out",
            pad_vocab=8,
            process_options=ProcessOptions(f"2/{index}"),
        )

    monkeypatch.setattr(BucketExecutor, "_finish", finish_together)
    if in_turn:
        monkeypatch.setattr(BucketPublication, "publish", publish_in_turn)
    with open_site(home, tmp_path, monkeypatch, capsys) as site:
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(convert, index) for index in range(2)]
        for run in runs:
            run.result()
        assert site.store.stored.count("bucket/out/prep-manifest.json") == 1
        assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]
