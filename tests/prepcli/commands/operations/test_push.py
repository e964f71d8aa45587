"""`prep export --push`: the export is uploaded, and a failed upload leaves the export complete."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.hub_push import PushTarget, parse_push_target
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.hub_server import hub_environment
from tests.helpers.push_server import TOKEN, FakePushHub, PushedRepo, serve_push_hub
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.waits


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


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_push_uploads_the_export(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        report = Runner(hub, tmp_path)(
            "export", str(init), "--out", "hf", "--push", "o/m", "--private"
        )
        assert report["ok"], report
        assert report["pushed"] == {
            "repo": "o/m",
            "revision": "main",
            "commit": f"{hub.url}/o/m/commit/{'1' * 40}",
        }
        assert hub.repos["o/m"].private
        assert hub.repos["o/m"].branches["main"] == read_files(tmp_path / "hf")
        assert not [line for line in hub.unauthenticated if not line.startswith("PUT /lfs/")]


def test_push_of_a_finished_export_uploads_once(init: Path, tmp_path: Path):
    arguments = ("export", str(init), "--out", "hf")
    with serve_push_hub() as hub:
        prep = Runner(hub, tmp_path)
        assert prep(*arguments)["already"] is False
        assert prep(*arguments, "--push", "o/m")["already"] is True
        assert sum(line.startswith("PUT") for line in hub.requests) == 1
        hub.requests.clear()
        assert prep(*arguments, "--push", "o/m")["ok"]
        assert not [line for line in hub.requests if line.startswith("PUT")]


def test_push_uploads_to_the_named_branch(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        report = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m@padded")
        assert report["pushed"]["revision"] == "padded"
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
            "--push",
            "o/m",
        )
        assert Runner(hub, tmp_path)(*words)["ok"]
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
    for text in (
        "m",
        "o/m/n",
        "o/",
        "/m",
        "o/m@",
        "o/m@-x",
        "o/m@a..b",
        "o/m@a/",
        "o/a--b",
        "-o/m",
        "o/m\n",
        "../m",
    ):
        with pytest.raises(PrepError) as caught:
            parse_push_target(text, False)
        assert caught.value.code == 2
