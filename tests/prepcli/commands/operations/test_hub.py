"""Models of the hub: `--stream` over an unreliable network, and `prep export --push`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.hub_push import PushTarget, parse_push_target
from tests.helpers.fork_server import PREP, ForkedProcess, run_python, start_python
from tests.helpers.hub_server import COMMIT, FakeHub, FakeRepo, hub_environment, serve_hub
from tests.helpers.killing import read_files
from tests.helpers.push_server import TOKEN, FakePushHub, PushedRepo, serve_push_hub
from tests.helpers.range_server import FakeFileStore, FaultInjector, serve_ranges
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.waits
PREP_SCRIPT = """
import sys
from prepcli.stores import byte_ranges
from prepcli.commands.cli.main import main
byte_ranges.FIRST_WAIT_S = 0.001
sys.exit(main())
"""
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True)
class HubSite:
    """Hub with one model, its file store, and a working folder."""

    hub: FakeHub
    store: FakeFileStore
    cwd: Path

    @property
    def environment(self) -> dict[str, str]:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
        }
        return inherited | self.hub.environment(self.cwd / "home") | {"HF_TOKEN": "hf_secret"}

    def start_prep(self, *arguments: str, **variables: str) -> ForkedProcess:
        return start_python(
            PREP_SCRIPT, *arguments, "--json", cwd=self.cwd, env=self.environment | variables
        )

    def run_prep(self, *arguments: str, **variables: str) -> dict[str, Any]:
        out, _ = self.start_prep(*arguments, **variables).communicate()
        return json.loads(out)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a 54 MB model: large tensors are read in parts, small ones ahead."""
    folder = tmp_path_factory.mktemp("model") / "m"
    make_checkpoint(folder, vocab_size=9001, hidden_size=512, num_heads=4)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def serve_site(
    files: dict[str, bytes], cwd: Path, faults: FaultInjector | None = None, lasts: int = 1 << 30
) -> Iterator[HubSite]:
    large = tuple(name for name in files if name.endswith((".safetensors", ".bin")))
    kept = {hashlib.sha256(files[name]).hexdigest(): files[name] for name in large}
    with serve_ranges(kept, faults, lasts) as store:
        repos = {
            "o/good": FakeRepo(files, large=large, store=store),
            "o/bin": FakeRepo({"config.json": b"{}", "m.gguf": b""}),
        }
        with serve_hub(repos) as hub:
            yield HubSite(hub, store, cwd)


def read_output_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files except the manifest, which records the source."""
    return {name: data for name, data in read_files(folder).items() if name != "prep-manifest.json"}


def cached_file_names(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("hub/models--*/snapshots/*/*"))


SAVE_INIT = ("save-init", "o/good", "--mesh", "1,2,2", "--pad-vocab", "8")


@pytest.mark.slow
def test_stream_with_network_faults_equals_local(files, tmp_path: Path):
    faults = FaultInjector(0.3, seed=11)
    with serve_site(files, tmp_path, faults, lasts=9) as site:
        streamed = site.run_prep(*SAVE_INIT, "--stream", "--out", "streamed", "--memory", "32MiB")
        assert streamed["ok"], streamed.get("error")
        assert sum(map(bool, faults.injected)) >= 5
        assert cached_file_names(tmp_path / "home") == sorted(SMALL_FILES)
        assert not [headers for _, _, headers in site.store.requests if "Authorization" in headers]
        faults.rate, site.store.max_url_uses = 0.0, 1 << 30
        first = site.run_prep(*SAVE_INIT[:2], "--dry-run")
        assert first["ok"], first
        for path in (tmp_path / "home").rglob("*"):
            if path.is_file():
                os.utime(path, ns=(0, 0))  # streamed files have no modification time
        local = site.run_prep(*SAVE_INIT, "--out", "local")
        assert local["ok"], local
    assert read_output_files(tmp_path / "streamed") == read_output_files(tmp_path / "local")
    manifests = [
        json.loads((tmp_path / name / "prep-manifest.json").read_text())
        for name in ("streamed", "local")
    ]
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    weights = [name for name in files if name.endswith(".safetensors")]
    assert manifests[0]["source"]["files"] == [
        {
            "path": n,
            "size": len(files[n]),
            "mtime_ns": 0,
            "digest": f"sha256:{hashlib.sha256(files[n]).hexdigest()}",
        }
        for n in sorted(weights)
    ]
    assert streamed["source"]["revision"] == COMMIT
    assert streamed["memory"]["peak"] <= streamed["memory"]["budget"] == 32 << 20


def test_killed_stream_resumes_without_rereading(files, tmp_path: Path):
    options = ("--stream", "--memory", "32MiB")
    with serve_site(files, tmp_path) as site:
        whole = site.run_prep(*SAVE_INIT, *options, "--out", "whole")
        assert whole["ok"], whole.get("error")
        site.store.requests.clear()
        site.store.delay_s = 0.15
        running = site.start_prep(*SAVE_INIT, *options, "--out", "killed")
        notes = tmp_path / "killed.partial/.prep/done"
        wait_until(lambda: notes.is_dir() and any(notes.iterdir()), running)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        assert not (tmp_path / "killed").exists()
        site.store.delay_s = 0.0
        resumed = site.run_prep(*SAVE_INIT, *options, "--out", "killed")
    assert resumed["ok"], resumed.get("error")
    assert resumed["bytes"]["resumed"] > 16 << 20
    assert read_output_files(tmp_path / "killed") == read_output_files(tmp_path / "whole")


def test_stream_is_rejected_offline(files, tmp_path: Path):
    with serve_site(files, tmp_path) as site:
        by_variable = site.run_prep(*SAVE_INIT, "--stream", HF_HUB_OFFLINE="1")["error"]
        assert by_variable["why"] == "HF_HUB_OFFLINE=1 disables network access"
        by_option = site.run_prep(*SAVE_INIT, "--stream", "--offline")["error"]
        assert by_option["what"] == "cannot stream o/good"
        assert by_option["why"] == "`--offline` disables network access"
        assert site.hub.requests == []


def test_stream_rejects_unsupported_formats(files, tmp_path: Path):
    with serve_site(files, tmp_path) as site:
        assert (
            site.run_prep("save-init", "o/bin", "--stream")["error"]["what"]
            == "o/bin is in GGUF format"
        )


# Change of the files of a model, and how its error begins
BROKEN_FILES: list[tuple[dict[str, bytes | None], str]] = [
    (
        {"model-00001-of-00003.safetensors": b"\x00" * 3000},
        "model-00001-of-00003.safetensors is not a safetensors file",
    ),
    ({"model-00002-of-00003.safetensors": None}, "1 of 3 files of o/good is missing"),
]


@pytest.mark.parametrize(("changes", "what"), BROKEN_FILES)
def test_error_of_a_broken_file_names_the_model(
    files: dict[str, bytes], tmp_path: Path, changes: dict[str, bytes | None], what: str
):
    broken = {name: data for name, data in (files | changes).items() if data is not None}
    with serve_site(broken, tmp_path) as site:
        error = site.run_prep(*SAVE_INIT, "--stream")["error"]
    assert error["what"].startswith(what)
    assert "prep-remote" not in json.dumps(error)


def test_hub_files_of_an_output_are_checked(tmp_path: Path):
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m/LICENSE").write_text("listed, but not downloaded")
    run_ok("pad-vocab", str(tmp_path / "m"), "--multiple", "8", "--out", str(tmp_path / "padded"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "padded").iterdir()}
    with serve_site(files, tmp_path) as site:
        intact = site.run_prep("save-init", "o/good", "--out", "init", "--stream")
        assert intact["ok"], intact
    shutil.rmtree(tmp_path / "home")
    files["generation_config.json"] = files["generation_config.json"].replace(b"{", b"{ ", 1)
    with serve_site(files, tmp_path) as site:
        error = site.run_prep("save-init", "o/good", "--out", "again", "--stream")["error"]
    assert error["what"].endswith("generation_config.json is damaged")


def test_lock_pins_the_commit_of_the_hub(files, tmp_path: Path):
    """A lock of streamed weights has the SHA-256 that the hub publishes, and its commit is read later."""
    with serve_site(files, tmp_path) as site:
        locked = site.run_prep("lock", "o/good", "--stream")
        assert (locked["path"], locked["revision"]) == ("good.lock.json", COMMIT)
        entries = json.loads((tmp_path / "good.lock.json").read_bytes())["files"]
        for name, data in files.items():
            if name != "model.safetensors.index.json":
                assert entries[name]["digest"] == hashlib.sha256(data).hexdigest()
        lock = ("--lock", "good.lock.json")
        requests = len(site.hub.requests)
        assert site.run_prep(*SAVE_INIT, "--stream", *lock, "--out", "init")["ok"]
        proof = site.run_prep("verify", "init", "--chain", "--stream")
        assert proof["origins"] == [f"o/good at commit {COMMIT}"]
        assert proof["links"][0]["proof"].startswith("commit, ")
        pinned = [line for line in site.hub.requests[requests:] if "/resolve/" in line]
        assert pinned
        assert all(f"/resolve/{COMMIT}/" in line for line in pinned)
        assert site.run_prep(*SAVE_INIT, "--revision", "main", *lock, "--out", "downloaded")["ok"]


# `prep export --push`: the export is uploaded, and a failed upload leaves the export complete


@dataclass(frozen=True)
class Runner:
    """Runs prep in a folder against a hub, with a token."""

    hub: FakePushHub
    cwd: Path

    def __call__(self, *arguments: str, token: str = TOKEN, **variables: str) -> dict[str, Any]:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
        }
        hub_variables = hub_environment(self.hub.url, self.cwd / "home") | (
            {"HF_TOKEN": token} if token else {}
        )
        process = run_python(
            PREP, *arguments, "--json", cwd=self.cwd, env=inherited | hub_variables | variables
        )
        assert "hf_" not in process.stdout + process.stderr, "the token leaked"
        return json.loads(process.stdout)


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an init checkpoint with prep."""
    folder = tmp_path_factory.mktemp("init")
    make_checkpoint(folder / "m")
    run_ok("save-init", str(folder / "m"), "--out", str(folder / "m-init"))
    return folder / "m-init"


def test_push_uploads_to_the_named_branch(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        words = ("export", str(init), "--out", "hf", "--push", "o/m@padded", "--private")
        assert Runner(hub, tmp_path)(*words)["pushed"] == {
            "repo": "o/m",
            "revision": "padded",
            "commit": f"{hub.url}/o/m/commit/{'1' * 40}",
        }
        assert hub.repos["o/m"].private
        assert hub.repos["o/m"].branches["main"] == {}
        assert hub.repos["o/m"].branches["padded"] == read_files(tmp_path / "hf")


def test_push_replaces_weights_and_keeps_other_files(init: Path, tmp_path: Path):
    old = {"model.safetensors": b"old", "README.md": b"mine", "pytorch_model.bin": b"mine too"}
    with serve_push_hub({"o/m": PushedRepo(True, {"main": dict(old)})}) as hub:
        report = Runner(hub, tmp_path)(
            "export", str(init), "--out", "hf", "--shard-size", "40KB", "--push", "o/m"
        )
        assert report["ok"], report
        remote_files = hub.repos["o/m"].branches["main"]
    assert remote_files == {"README.md": b"mine", "pytorch_model.bin": b"mine too"} | read_files(
        tmp_path / "hf"
    )
    assert "model.safetensors" not in remote_files


@pytest.mark.slow
def test_push_keeps_weights_of_another_format(init: Path, tmp_path: Path):
    old = {
        "flax_model.msgpack": b"old",
        "flax_model-00001-of-00009.msgpack": b"older",
        "model.safetensors": b"theirs",
    }
    with serve_push_hub({"o/m": PushedRepo(True, {"main": dict(old)})}) as hub:
        words = (
            "export",
            str(init),
            "--out",
            "flax",
            "--layout",
            "hf-flax",
            "--shard-size",
            "40KB",
        )
        assert Runner(hub, tmp_path)(*words, "--push", "o/m")["ok"]
        remote_files = hub.repos["o/m"].branches["main"]
    assert remote_files == {"model.safetensors": b"theirs"} | read_files(tmp_path / "flax")
    assert "flax_model.msgpack.index.json" in remote_files


@pytest.mark.parametrize(
    "broken", slow_except(["PUT /lfs/", "/commit/", "/preupload/", "/repos/create"], ["/commit/"])
)
def test_failed_push_can_be_repeated(init: Path, tmp_path: Path, broken: str):
    arguments = ("export", str(init), "--out", "hf", "--push", "o/m")
    with serve_push_hub() as hub:
        prep, hub.failing_requests = Runner(hub, tmp_path), broken
        error = prep(*arguments)["error"]
        assert error["what"] == "cannot push to o/m"
        assert error["why"] == "HTTP 400 from the hub; the export in hf is complete"
        assert error["hint"] == "run the same command again to resume"
        assert prep("verify", "hf")["ok"]
        assert not hub.repos.get("o/m", PushedRepo(False)).branches["main"]
        hub.failing_requests = "\0"
        assert prep(*arguments)["already"] is True
        assert hub.repos["o/m"].branches["main"] == read_files(tmp_path / "hf")


REFUSALS = {
    401: "HTTP 401 from the hub: the token is invalid",
    403: "HTTP 403 from the hub: the token has no write access",
    404: "HTTP 404 from the hub: unknown owner, repository or branch",
}


@pytest.mark.parametrize("status", slow_except(REFUSALS, [403]))
def test_push_reports_refusals_of_the_hub(init: Path, tmp_path: Path, status: int):
    with serve_push_hub() as hub:
        hub.failing_requests, hub.status = "/repos/create", status
        error = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m")["error"]
    assert error["why"] == f"{REFUSALS[status]}; the export in hf is complete"


def test_push_checks_requirements_before_the_export(init: Path, tmp_path: Path):
    with serve_push_hub({"o/open": PushedRepo(False)}) as hub:
        prep = Runner(hub, tmp_path)
        arguments = ("export", str(init), "--out", "hf", "--push")
        assert prep(*arguments, "o/m", token="")["error"]["why"] == "no token is configured"
        assert (
            prep(*arguments, "o/m", token="another")["error"]["why"]
            == "HTTP 401 from the hub: the token is invalid"
        )
        assert prep(*arguments, "o/open", "--private")["error"]["what"] == "o/open is public"
        assert prep(*arguments, "nobody")["error"]["code"] == 2
        assert (
            prep(*arguments, "o/m", HF_HUB_OFFLINE="1")["error"]["why"] == "HF_HUB_OFFLINE is set"
        )
        assert (
            prep(*arguments[:-1], "--private")["error"]["what"] == "`--private` requires `--push`"
        )
        assert (
            prep(*arguments, "o/m", "--processes", "2/0")["error"]["what"]
            == "`--push` is not supported with several processes"
        )
        assert prep(*arguments, "o/m", "--dry-run")["ok"]
        assert "o/m" not in hub.repos
    assert not (tmp_path / "hf").exists()


def test_push_reports_an_unreachable_hub(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        pass
    error = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m")["error"]
    assert error["why"] == "the hub cannot be reached, or closed the connection"
    assert not (tmp_path / "hf").exists()


def test_parse_push_target_returns_target_or_usage_error():
    assert parse_push_target("o/m", False) == PushTarget("o/m")
    assert parse_push_target("o/m@v1.0", True) == PushTarget("o/m", "v1.0", True)
    repos = ["m", "o/m/n", "o/", "/m", "o/a--b", "-o/m", "o/m\n", "../m"]
    branches = ["o/m@", "o/m@-x", "o/m@a..b", "o/m@a/"]
    for text in repos + branches:
        with pytest.raises(PrepError) as caught:
            parse_push_target(text, False)
        assert caught.value.code == 2
