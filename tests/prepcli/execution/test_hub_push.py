"""Pushes to a hub that stalls, refuses, or answers nonsense at any step: one error, and the folder is unchanged."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from prepcli.core.errors import PrepError
from prepcli.core.observer import NullProgress
from prepcli.execution.hub_push import PushTarget, check_push, push_folder
from prepcli.stores.byte_ranges import RetryPolicy
from tests.helpers.push_server import TOKEN, FakePushHub, PushedRepo, serve_push_hub
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S

pytestmark = pytest.mark.waits

FILES = {"config.json": b"{}", "model.safetensors": bytes(1000)}
TARGET = PushTarget("o/m", "side")
STEPS = (
    "GET /api/whoami",
    "POST /api/repos/create",
    "/branch/",
    "GET /api/models/o/m/tree",
    "/preupload/",
)
LARGE_STEPS = ("/info/lfs/", "PUT /lfs/", "/commit/")
NONSENSE = {
    "html": b"<html>log in</html>",
    "list": b"[]",
    "null": b"null",
    "empty": b"",
    "noise": b"\xff\x00{",
}
STATUSES = (401, 403, 404, 409, 413, 429, 500, 503)
# prep ignores the bodies of these answers.
HARMLESS = {
    "GET /api/whoami",
    "POST /api/repos/create",
    "/branch/",
    "PUT /lfs/",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePushHub]:
    with serve_push_hub({"o/m": PushedRepo(False)}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        no_sleep = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
        monkeypatch.setattr(_http, "time", no_sleep)  # the library's own wait between tries
        yield hub
    _http.set_client_factory(_http.default_client_factory)


def check_and_push(folder: Path, notes: list[str], timeout_s: float = MAX_S) -> str:
    patience = RetryPolicy(timeout_s, notes.append)
    check_push(TARGET, patience)
    return push_folder(folder, TARGET, progress=NullProgress(), retry_policy=patience)


@pytest.mark.parametrize(
    ("step", "stall"),
    slow_except(
        [(step, stall) for stall in ("silent", "close") for step in (*STEPS, *LARGE_STEPS)],
        lambda case: case in (("PUT /lfs/", "close"), ("/commit/", "silent")),
    ),
)
def test_push_reports_a_stall_once(hub: FakePushHub, folder: Path, step: str, stall: str):
    hub.failing_requests, hub.stall, notes = step, stall, list[str]()
    with pytest.raises(PrepError) as caught:
        check_and_push(folder, notes, 0.5)
    assert caught.value.what == "cannot push to o/m"
    assert caught.value.why.startswith(
        "no answer from" if stall == "silent" else hub.url.removeprefix("http://")
    )
    assert step == "/commit/" or len(notes) >= 3  # the commit is not retried
    assert not hub.repos["o/m"].branches["main"]
    hub.failing_requests = "\0"
    check_and_push(folder, notes)
    assert hub.repos["o/m"].branches["side"] == FILES


@pytest.mark.parametrize(
    ("step", "nonsense"),
    slow_except(
        [
            (step, nonsense)
            for step in (*STEPS, *LARGE_STEPS)
            if step not in HARMLESS
            for nonsense in NONSENSE
        ],
        lambda case: case[0] == "/commit/",
    ),
)
def test_push_reports_a_malformed_answer_once(
    hub: FakePushHub, folder: Path, step: str, nonsense: str
):
    hub.failing_requests, hub.body = step, NONSENSE[nonsense]
    if (step, nonsense) == ("GET /api/models/o/m/tree", "list"):
        hub.failing_requests = "/info/refs"  # a new branch has an empty list of files
        assert check_and_push(folder, [])
        return
    with pytest.raises(PrepError) as caught:
        check_and_push(folder, [])
    assert caught.value.what == "cannot push to o/m"
    assert caught.value.why == "the hub's answer is malformed"


@pytest.mark.parametrize(
    ("step", "status"),
    slow_except(
        [
            (step, status)
            for step in ("/preupload/", "PUT /lfs/", "/commit/")
            for status in STATUSES
        ],
        lambda case: case in (("PUT /lfs/", 403), ("/preupload/", 401), ("/commit/", 503)),
    ),
)
def test_push_reports_the_status_of_a_refusal(
    hub: FakePushHub, folder: Path, step: str, status: int
):
    hub.failing_requests, hub.status = step, status
    with pytest.raises(PrepError) as caught:
        check_and_push(folder, [], 0.5)
    assert caught.value.what == "cannot push to o/m"
    assert caught.value.why.startswith(f"HTTP {status} from the hub")


def test_push_detects_a_commit_without_the_files(hub: FakePushHub, folder: Path):
    hub.failing_requests = "/commit/"
    hub.body = json.dumps(
        {"commitUrl": f"{hub.url}/o/m/commit/{'1' * 40}", "commitOid": "1" * 40}
    ).encode()
    with pytest.raises(PrepError) as caught:
        check_and_push(folder, [])
    assert caught.value.what == "cannot push all files to o/m"
    assert caught.value.why == "the hub made a commit without config.json, model.safetensors"


def test_push_sends_the_commit_once(hub: FakePushHub, folder: Path):
    hub.failing_requests, hub.status = "/commit/", 503
    with pytest.raises(PrepError):
        check_and_push(folder, [])
    assert sum("/commit/" in line for line in hub.requests) == 1
