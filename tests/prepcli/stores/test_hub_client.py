"""Hubs that do not answer, answer too slowly or answer garbage: the bytes are right, or one error in bounded time."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import HfApi, constants, file_download, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.sources.locate import locate
from prepcli.sources.open_folder import Access
from prepcli.sources.opening import open_source
from prepcli.stores import byte_ranges
from prepcli.stores.byte_ranges import RemoteFile, RetryPolicy, read_range
from prepcli.stores.hub_client import (
    HubRangeReader,
    NoAnswerError,
    install_retrying_client,
    retry_after_s,
)
from tests.helpers.hub_server import COMMIT, FakeHub, FakeRepo, serve_hub
from tests.helpers.loopback import STALL_KINDS
from tests.helpers.range_server import (
    FAULT_KINDS,
    SURPLUS_KINDS,
    FakeFileStore,
    FaultInjector,
    serve_ranges,
)
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


@pytest.mark.parametrize("stall", slow_except(STALL_KINDS, ["silent"]))
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


@pytest.mark.parametrize("stall", slow_except(["silent", "body", "midway"], ["silent"]))
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


@pytest.mark.parametrize("listing", slow_except(MALFORMED_ANSWERS, ["html", "names"]))
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


@pytest.mark.parametrize("stall", slow_except(STALL_KINDS, ["close", "midway"]))
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
    [
        ("save-init", "o/m"),
        pytest.param(("inspect", "o/m", "--stream"), marks=pytest.mark.slow),
    ],
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


CONTENT = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8).tobytes()
ZEROS = bytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILE = RemoteFile("model.safetensors", len(CONTENT), f"sha256:{SHA256}")


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


@contextmanager
def serve_large_file(
    faults: FaultInjector, lasts: int = 1 << 30
) -> Iterator[tuple[HubRangeReader, FakeHub, FakeFileStore]]:
    """Serve a hub that redirects to a file store for one large file."""
    with serve_ranges({SHA256: CONTENT}, faults, lasts) as store:
        repo = FakeRepo({FILE.path: CONTENT}, store=store, large=(FILE.path,))
        with serve_hub({"o/m": repo}) as hub:
            yield HubRangeReader("o/m", COMMIT, hub.url), hub, store


def read(ranges: HubRangeReader, offset: int, size: int, file: RemoteFile = FILE) -> bytes:
    into = np.zeros(size, np.uint8)
    read_range(ranges, file, offset=offset, into=into)
    return into.tobytes()


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_read_recovers_from_each_fault(kind: str):
    faults = FaultInjector(0.6, (kind,), seed=3)
    with serve_large_file(faults) as (ranges, _, _):
        for offset in range(0, 300_000, 50_000):
            assert read(ranges, offset, 50_000) == CONTENT[offset : offset + 50_000]
    assert kind in faults.injected


@pytest.mark.parametrize("kind", SURPLUS_KINDS)
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_bytes_after_the_range_are_dropped(kind: str, rate: float):
    with serve_large_file(FaultInjector(rate, (kind,), seed=3)) as (ranges, _, _):
        for offset in range(0, 200_000, 20_000):
            assert read(ranges, offset, 20_000) == CONTENT[offset : offset + 20_000]


@pytest.mark.slow
def test_read_recovers_from_mixed_faults_and_expired_urls():
    faults = FaultInjector(0.3, seed=5)
    with serve_large_file(faults, lasts=3) as (ranges, hub, _):
        for number in range(100):
            offset = number * 3001 % 250_000
            assert read(ranges, offset, 2000) == CONTENT[offset : offset + 2000]
    assert set(FAULT_KINDS) <= set(faults.injected)
    assert sum("/resolve/" in request for request in hub.requests) > 10


def test_read_reuses_the_signed_url():
    with serve_large_file(FaultInjector()) as (ranges, hub, store):
        for offset in range(0, 100_000, 1000):
            read(ranges, offset, 1000)
    assert (len(hub.requests), len(store.requests)) == (1, 100)


def test_token_is_sent_only_to_the_hub():
    with serve_large_file(FaultInjector(0.3)) as (ranges, hub, store):
        for offset in range(0, 100_000, 10_000):
            read(ranges, offset, 1000)
    assert {token for _, token in hub.authorizations} == {"Bearer hf_secret"}
    assert not [headers for _, _, headers in store.requests if "Authorization" in headers]


def test_read_accepts_a_file_without_redirect():
    faults = FaultInjector(0.3)
    with serve_hub({"o/m": FakeRepo({FILE.path: CONTENT}, faults=faults)}) as hub:
        ranges = HubRangeReader("o/m", COMMIT, hub.url)
        for offset in range(0, 300_000, 20_000):
            assert read(ranges, offset, 20_000) == CONTENT[offset : offset + 20_000]


def test_changed_etag_is_an_error():
    with serve_large_file(FaultInjector()) as (ranges, _, store):
        read(ranges, 0, 1000)
        store.files[SHA256] = ZEROS
        with pytest.raises(PrepError) as caught:
            read(ranges, 1000, 1000)
    assert caught.value.what == "model.safetensors changed while it was read"
    assert "its ETag was" in caught.value.why


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"!"])
def test_changed_size_is_an_error(content: bytes):
    with serve_large_file(FaultInjector()) as (ranges, _, store):
        store.files[SHA256] = content
        with pytest.raises(PrepError, match=f"it had 300,000 bytes, now it has {len(content):,}"):
            read(ranges, 0, 1000)


def test_changed_sha256_is_an_error():
    with (
        serve_large_file(FaultInjector()) as (ranges, _, _),
        pytest.raises(PrepError, match="the hub now has sha256:"),
    ):
        read(ranges, 0, 10, RemoteFile(FILE.path, FILE.size, "sha256:" + "0" * 64))


def test_truncated_file_is_an_error():
    with serve_large_file(FaultInjector()) as (ranges, _, store):
        read(ranges, 0, 1000)
        store.files[SHA256] = CONTENT[:1000]
        with pytest.raises(PrepError, match="changed while it was read"):
            read(ranges, 2000, 1000)


def test_missing_file_is_requested_again_then_an_error():
    with serve_large_file(FaultInjector()) as (ranges, hub, store):
        store.files.clear()
        with pytest.raises(PrepError) as caught:
            read(ranges, 0, 10)
    assert (
        caught.value.why
        == "8 tries in a row failed: HTTP 404 from the URL that the hub redirects to"
    )
    assert len(hub.requests) == 8


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (401, "HTTP 401 from the hub: access is not granted any more"),
        (404, "HTTP 404 from the hub"),
    ],
)
def test_http_4xx_of_the_hub_is_not_retried(status: int, why: str):
    with serve_hub({"o/m": FakeRepo(status=status)}) as hub:
        with pytest.raises(PrepError) as caught:
            read(HubRangeReader("o/m", COMMIT, hub.url), 0, 10)
        assert caught.value.why == why
        assert len(hub.requests) == 1


def test_unreachable_hub_is_an_error():
    with serve_hub({}) as stopped:
        pass
    with pytest.raises(PrepError) as caught:
        read(HubRangeReader("o/m", COMMIT, stopped.url), 0, 10)
    assert caught.value.why.startswith("8 tries in a row failed: ")
    assert caught.value.hint


def test_errors_contain_no_token_or_signed_url():
    with serve_large_file(FaultInjector(1.0, ("refuse",))) as (ranges, _, store):
        with pytest.raises(PrepError) as caught:
            read(ranges, 0, 10)
        assert "hf_secret" not in str(caught.value)
        assert "signature" not in str(caught.value)
        assert store.url not in str(caught.value)


def test_retry_after_s_parses_numbers_and_dates():
    assert retry_after_s({"retry-after": "7"}) == 7
    assert retry_after_s({}) == retry_after_s({"retry-after": "soon"}) == 0
    assert retry_after_s({"retry-after": "9" * 4000}) == 999_999_999
    assert retry_after_s({"retry-after": formatdate(0, usegmt=True)}) == 0
    assert retry_after_s({"retry-after": formatdate(4e9, usegmt=True)}) > 1e9


class Answer:
    """Fake response of an HTTP session."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status_code, self.headers, self.body = status, headers, body

    def close(self) -> None:
        """Do nothing."""

    def iter_raw(self) -> Iterator[bytes]:
        yield from (self.body[start : start + 7] for start in range(0, len(self.body), 7))


class Session:
    """Fake HTTP session that returns one answer after another, then repeats the last one."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers

    def build_request(self, *_: object, **__: object) -> None:
        """Ignore the request: the answers do not depend on it."""

    def send(self, *_: object, **__: object) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


TEXT = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=30)
COUNT = st.one_of(st.integers(0, 40), st.integers(0, 10**25)).map(str)
RANGE = st.one_of(
    TEXT, st.builds("bytes {}-{}/{}".format, COUNT, COUNT, st.one_of(COUNT, st.just("*")))
)
LOCATIONS = st.sampled_from(
    [
        "",
        "/x",
        "//[",
        "http://[::1",
        "https://elsewhere/x?s=1",
        "ftp://x",
        "http://a:b:c",
        "?",
        "\x80",
    ]
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-range": RANGE,
        "content-length": st.one_of(TEXT, COUNT),
        "location": st.one_of(LOCATIONS, TEXT),
        "etag": TEXT,
        "x-linked-etag": st.one_of(TEXT, st.just('"' + "0" * 64 + '"')),
        "retry-after": st.one_of(TEXT, COUNT),
        "content-encoding": TEXT,
    },
)
ANSWERS = st.builds(
    Answer,
    st.sampled_from([200, 206, 206, 206, 301, 302, 307, 401, 404, 416, 429, 503]),
    HEADERS,
    st.binary(max_size=40),
)


@pytest.mark.parametrize("count", slow_except((150, 1500), (150,)))
def test_arbitrary_answers_give_bytes_or_a_prep_error(monkeypatch, count: int):
    @settings(max_examples=count)
    @given(st.lists(ANSWERS, min_size=1, max_size=6), st.integers(0, 30))
    def check(answers: list[Answer], offset: int):
        monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: Session(list(answers)))
        monkeypatch.setattr("huggingface_hub.utils.build_hf_headers", lambda **_: {})
        monkeypatch.setattr(byte_ranges, "MAX_RETRY_AFTER_S", 0.0)
        monkeypatch.setattr(byte_ranges, "MAX_STALLED_TRIES", 3)
        into = np.zeros(10, np.uint8)
        with suppress(PrepError):
            read_range(
                HubRangeReader("o/m", COMMIT, "http://hub"),
                RemoteFile("f", 40, "sha256:" + "1" * 64),
                offset=offset,
                into=into,
            )

    check()
