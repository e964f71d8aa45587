"""Tests of byte ranges from faulty HTTP servers: the bytes are right, or the error names the fault."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.stores import byte_ranges
from prepcli.stores.byte_ranges import RemoteFile, read_range
from prepcli.stores.hub_ranges import HubRangeReader, retry_after_s
from tests.helpers.hub_server import COMMIT, FakeHub, FakeRepo, serve_hub
from tests.helpers.range_server import (
    FAULT_KINDS,
    SURPLUS_KINDS,
    FakeFileStore,
    FaultInjector,
    serve_ranges,
)
from tests.helpers.slow_cases import slow_except

pytestmark = pytest.mark.waits

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
    @settings(max_examples=count, deadline=None)
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
