"""Tests of hubs that do not answer, answer too slowly or answer garbage: notes, then one error, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants, file_download, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http

from prepcli.core.errors import PrepError
from prepcli.sources.folders import Access
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.stores.hub_client import NoAnswerError, install_retrying_client
from prepcli.stores.retries import RetryPolicy
from tests.helpers.hub_server import COMMIT, FakeHub, FakeRepo, serve_hub
from tests.helpers.loopback import STALL_KINDS
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S, wait_until

pytestmark = pytest.mark.waits

PREP = "import sys; from prepcli.commands.cli.main import main; sys.exit(main())"
MALFORMED_ANSWERS = {
    "html": b"<html>please log in</html>",
    "list": b"[]",
    "null": b"null",
    "empty": b"",
    "noise": b"\xff\x00{",
    "names": b'{"id": "o/m", "sha": "1", "siblings": [{"rfilename": 7}]}',
    "sha": b'{"id": "o/m", "sha": 7}',
}
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(100_000)}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Collect the notes of retries. Use an empty cache and no waits."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    no_sleep = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    # The library itself waits between tries.
    monkeypatch.setattr(file_download, "time", no_sleep)
    notes: list[str] = []
    yield notes
    _http.set_client_factory(_http.default_client_factory)


def use_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub use this hub, although it has already read HF_ENDPOINT."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.mark.parametrize("stall", STALL_KINDS)
def test_client_reports_retries_then_raises(notes: list[str], stall: str):
    # On a busy machine, a closed connection may be noticed after 0.1 s.
    timeout_s = 2.0 if stall == "close" else 0.1
    install_retrying_client(RetryPolicy(timeout_s, notes.append))
    with (
        serve_hub({"o/m": FakeRepo(stalls={"/api/": stall})}) as hub,
        pytest.raises(NoAnswerError, match=r"\(4 tries\)"),
    ):
        HfApi(endpoint=hub.url).model_info("o/m")
    assert [note.rpartition("; ")[2] for note in notes] == [
        f"trying again ({n} of 4)" for n in (2, 3, 4)
    ]
    host = hub.url.removeprefix("http://")
    expected_start = {"close": f"{host} closed", "body": f"{host} is too slow"}.get(
        stall, f"no answer from {host} for 0.1 s"
    )
    assert notes[0].startswith(expected_start)


@pytest.mark.parametrize("stall", ["silent", "body", "midway"])
def test_client_limits_the_time_of_downloads(notes: list[str], tmp_path: Path, stall: str):
    install_retrying_client(RetryPolicy(0.5, notes.append))
    repo = FakeRepo(FILES, stalls={"GET /o/m/resolve": stall})
    with serve_hub({"o/m": repo}) as hub, pytest.raises(NoAnswerError, match=r"\(4 tries\)"):
        hf_hub_download("o/m", "config.json", endpoint=hub.url, cache_dir=tmp_path)
    assert len(notes) == 3


def test_client_retries_503_and_keeps_the_status(notes: list[str]):
    install_retrying_client(RetryPolicy(0.05, notes.append))
    with serve_hub({"o/m": FakeRepo(status=503)}) as hub, pytest.raises(NoAnswerError) as caught:
        HfApi(endpoint=hub.url).model_info("o/m")
    assert caught.value.status == 503
    assert len(notes) == 3


def test_client_does_not_retry_403(notes: list[str]):
    install_retrying_client(RetryPolicy(5.0, notes.append))
    with serve_hub({"o/m": FakeRepo(status=403)}) as hub, pytest.raises(HfHubHTTPError):
        HfApi(endpoint=hub.url).model_info("o/m")
    assert notes == []


@pytest.mark.parametrize("listing", MALFORMED_ANSWERS)
def test_malformed_model_info_raises_prep_error(
    notes: list[str], monkeypatch: pytest.MonkeyPatch, listing: str
):
    with serve_hub({"o/m": FakeRepo(model_info=MALFORMED_ANSWERS[listing])}) as hub:
        use_hub(hub, monkeypatch)
        for open_model in (
            lambda: locate("o/m"),
            lambda: open_source(locate("o/m", access=Access(stream=True))),
        ):
            with pytest.raises(PrepError) as caught:
                open_model()
            assert caught.value.what in (
                "cannot read o/m",
                "cannot stream o/m",
                "`o/m` holds no checkpoint",
            )


def test_download_error_names_the_silent_host(notes: list[str], monkeypatch: pytest.MonkeyPatch):
    with serve_hub({"o/m": FakeRepo(stalls={"/api/": "silent"})}) as hub:
        use_hub(hub, monkeypatch)
        with pytest.raises(PrepError) as caught:
            locate("o/m", access=Access(retry_policy=RetryPolicy(0.05, notes.append)))
    assert caught.value.what == "cannot read o/m"
    host = hub.url.removeprefix("http://")
    assert (
        caught.value.why
        == f"no answer from {host} for 0.05 s (4 tries), and the model is not in the cache"
    )
    assert "PREP_TIMEOUT=60" in caught.value.hint


@pytest.mark.parametrize("stall", STALL_KINDS)
def test_open_remote_limits_the_time_of_ranges(
    notes: list[str], monkeypatch: pytest.MonkeyPatch, stall: str
):
    monkeypatch.setattr("prepcli.stores.byte_ranges.FIRST_WAIT_S", 0.001)
    repo = FakeRepo(FILES, stalls={f"GET /o/m/resolve/{COMMIT}/model": stall})
    with serve_hub({"o/m": repo}) as hub:
        use_hub(hub, monkeypatch)
        access = Access(stream=True, retry_policy=RetryPolicy(0.5, notes.append))
        located = locate("o/m", access=access)
        with pytest.raises(PrepError) as caught:
            open_source(located)
    assert caught.value.what == "cannot read model.safetensors of o/m"
    assert notes
    assert all(note.startswith("model.safetensors: ") for note in notes)


@pytest.mark.parametrize(
    "arguments",
    slow_except(
        [(("save-init", "o/m"),), (("inspect", "o/m", "--stream"),)], [(("save-init", "o/m"),)]
    ),
)
def test_ctrl_c_interrupts_a_request(tmp_path: Path, arguments: tuple[str, ...]):
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
    }
    with serve_hub({"o/m": FakeRepo(FILES, stalls={"GET /o/m/resolve/": "silent"})}) as hub:
        variables = inherited | hub.environment(tmp_path / "home") | {"PREP_TIMEOUT": "600"}
        command = [sys.executable, "-c", PREP, *arguments]
        process = subprocess.Popen(
            command, env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: any("GET /o/m/resolve/" in line for line in hub.requests), process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
