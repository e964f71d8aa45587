"""`prep export --push`: what is uploaded is the export, and an upload that fails leaves the export whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prepcli.errors import PrepError
from prepcli.execution.hub_push import PushTarget, parse_push_target
from tests.helpers.hub_server import hub_environment
from tests.helpers.push_server import TOKEN, FakePushHub, PushedRepo, serve_push_hub
from tests.helpers.tiny_checkpoints import make_checkpoint

PREP = "import sys; from prepcli.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Runner:
    """Runs prep in a folder against a hub, with a token or another one."""

    hub: FakePushHub
    cwd: Path

    def __call__(self, *arguments: str, token: str = TOKEN, **variables: str) -> dict[str, Any]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))}
        own = hub_environment(self.hub.url, self.cwd / "home") | ({"HF_TOKEN": token} if token else {})
        done = subprocess.run(
            [sys.executable, "-c", PREP, *arguments, "--json"],
            env=inherited | own | variables,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "hf_" not in done.stdout + done.stderr, "a token is nobody's business"
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An init checkpoint, made by prep itself."""
    folder = tmp_path_factory.mktemp("init")
    make_checkpoint(folder / "m")
    done = subprocess.run([sys.executable, "-c", PREP, "save-init", "./m"], cwd=folder, check=False)
    assert done.returncode == 0
    return folder / "m-init"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_pushed_is_the_export(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        found = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m", "--private")
        assert found["ok"], found
        assert found["pushed"] == {"repo": "o/m", "revision": "main", "commit": f"{hub.url}/o/m/commit/{'1' * 40}"}
        assert hub.repos["o/m"].private
        assert hub.repos["o/m"].branches["main"] == contents(tmp_path / "hf")
        assert not [line for line in hub.unauthenticated if not line.startswith("PUT /lfs/")]


def test_of_a_finished_export_nothing_is_made_again_and_nothing_is_sent_twice(init: Path, tmp_path: Path):
    arguments = ("export", str(init), "--out", "hf")
    with serve_push_hub() as hub:
        prep = Runner(hub, tmp_path)
        assert prep(*arguments)["already"] is False
        assert prep(*arguments, "--push", "o/m")["already"] is True
        assert sum(line.startswith("PUT") for line in hub.requests) == 1
        hub.requests.clear()
        assert prep(*arguments, "--push", "o/m")["ok"]
        assert not [line for line in hub.requests if line.startswith("PUT")]


def test_a_branch_of_its_own(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        found = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m@padded")
        assert found["pushed"]["revision"] == "padded"
        assert hub.repos["o/m"].branches["main"] == {}
        assert hub.repos["o/m"].branches["padded"] == contents(tmp_path / "hf")


def test_weights_of_an_earlier_push_go_with_the_same_commit_and_what_is_not_ours_stays(init: Path, tmp_path: Path):
    old = {"model.safetensors": b"old", "README.md": b"mine", "pytorch_model.bin": b"mine too"}
    with serve_push_hub({"o/m": PushedRepo(True, {"main": dict(old)})}) as hub:
        found = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--shard-size", "40KB", "--push", "o/m")
        assert found["ok"], found
        there = hub.repos["o/m"].branches["main"]
    assert there == {"README.md": b"mine", "pytorch_model.bin": b"mine too"} | contents(tmp_path / "hf")
    assert "model.safetensors" not in there


def test_of_each_format_an_earlier_push_goes_and_weights_of_another_format_stay(init: Path, tmp_path: Path):
    old = {"flax_model.msgpack": b"old", "flax_model-00001-of-00009.msgpack": b"older", "model.safetensors": b"theirs"}
    with serve_push_hub({"o/m": PushedRepo(True, {"main": dict(old)})}) as hub:
        words = ("export", str(init), "--out", "flax", "--layout", "hf-flax", "--shard-size", "40KB", "--push", "o/m")
        assert Runner(hub, tmp_path)(*words)["ok"]
        there = hub.repos["o/m"].branches["main"]
    assert there == {"model.safetensors": b"theirs"} | contents(tmp_path / "flax")
    assert "flax_model.msgpack.index.json" in there


@pytest.mark.parametrize("broken", ["PUT /lfs/", "/commit/", "/preupload/", "/repos/create"])
def test_an_upload_that_fails_leaves_the_export_whole_and_can_be_made_again(init: Path, tmp_path: Path, broken: str):
    arguments = ("export", str(init), "--out", "hf", "--push", "o/m")
    with serve_push_hub() as hub:
        prep, hub.failing_requests = Runner(hub, tmp_path), broken
        error = prep(*arguments)["error"]
        assert error["what"] == "cannot push to o/m"
        assert error["why"] == "the hub says 400; the export in hf is complete"
        assert error["hint"].startswith("run the same command again")
        assert prep("verify", "hf")["ok"]
        assert not hub.repos.get("o/m", PushedRepo(False)).branches["main"]
        hub.failing_requests = "\0"
        assert prep(*arguments)["already"] is True
        assert hub.repos["o/m"].branches["main"] == contents(tmp_path / "hf")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (401, "the hub says 401: it does not take the token"),
        (403, "the hub says 403: the token may not write there"),
        (404, "the hub says 404: there is no such owner, repository or branch"),
    ],
)
def test_refusals_of_the_hub(init: Path, tmp_path: Path, status: int, why: str):
    with serve_push_hub() as hub:
        hub.failing_requests, hub.status = "/repos/create", status
        error = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m")["error"]
    assert error["why"] == f"{why}; the export in hf is complete"


def test_what_cannot_work_is_said_before_anything_is_made(init: Path, tmp_path: Path):
    with serve_push_hub({"o/open": PushedRepo(False)}) as hub:
        prep = Runner(hub, tmp_path)
        arguments = ("export", str(init), "--out", "hf", "--push")
        assert (
            prep(*arguments, "o/m", token="")["error"]["why"] == "there is no token: the hub would not know who you are"
        )
        assert (
            prep(*arguments, "o/m", token="another")["error"]["why"] == "the hub says 401: it does not take the token"
        )
        assert prep(*arguments, "o/open", "--private")["error"]["what"] == "o/open is public"
        assert prep(*arguments, "nobody")["error"]["code"] == 2
        assert prep(*arguments, "o/m", HF_HUB_OFFLINE="1")["error"]["why"] == "HF_HUB_OFFLINE asks for no network"
        assert prep(*arguments[:-1], "--private")["error"]["what"] == "`--private` requires `--push`"
        assert prep(*arguments, "o/m", "--processes", "2/0")["error"]["what"] == "`--push` is not supported with several processes"
        assert prep(*arguments, "o/m", "--dry-run")["ok"]
        assert "o/m" not in hub.repos
    assert not (tmp_path / "hf").exists()


def test_a_hub_that_is_away(init: Path, tmp_path: Path):
    with serve_push_hub() as hub:
        pass
    error = Runner(hub, tmp_path)("export", str(init), "--out", "hf", "--push", "o/m")["error"]
    assert error["why"] == "the hub cannot be reached, or hung up"
    assert not (tmp_path / "hf").exists()


def test_names():
    assert parse_push_target("o/m", False) == PushTarget("o/m")
    assert parse_push_target("o/m@v1.0", True) == PushTarget("o/m", "v1.0", True)
    for text in ("m", "o/m/n", "o/", "/m", "o/m@", "o/m@-x", "o/m@a..b", "o/m@a/", "o/a--b", "-o/m", "o/m\n", "../m"):
        with pytest.raises(PrepError) as caught:
            parse_push_target(text, False)
        assert caught.value.code == 2
