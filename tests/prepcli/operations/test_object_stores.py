"""Commands that read checkpoints from object stores and write to them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.cli.main import main
from prepcli.errors import UsageError
from prepcli.remote import remote_files
from prepcli.remote.bucket_lock import BucketLock
from prepcli.remote.object_store import Bucket, parse_url
from prepcli.remote.remote_files import LOCK_FILE
from prepcli.sources.openers import orbax_item
from tests.helpers.fork_server import ForkedProcess, start_python
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.waits

PREP_SCRIPT = """
import sys
from prepcli.remote import remote_files
from prepcli.remote.bucket_lock import BucketLock
from prepcli.remote.object_store import Bucket, parse_url
from prepcli.remote.remote_files import LOCK_FILE
from prepcli.cli.main import main
remote_files.FIRST_WAIT_S = 0.001
sys.exit(main())
"""
READ_FAULTS = ("drop", "empty", "refuse", "busy", "limit", "short")
LAST_WRITES = ["PUT bucket/out/commit_success.txt", "PUT bucket/out/prep-manifest.json"]


@dataclass(frozen=True)
class StoreSite:
    """Object store, which the environment names, and the working folder."""

    store: FakeObjectStore
    cwd: Path
    capsys: pytest.CaptureFixture[str]

    def run_prep(self, *arguments: str) -> dict[str, Any]:
        """Run a command in this process, and return its JSON."""
        self.capsys.readouterr()
        main([*arguments, "--json"])
        captured = self.capsys.readouterr()
        return self._parse(captured.out, captured.err)

    def start_prep(self, *arguments: str) -> ForkedProcess:
        """Start a command in its own process."""
        return start_python(PREP_SCRIPT, *arguments, "--json")

    def run_process(self, *arguments: str) -> dict[str, Any]:
        """Run a command in its own process, and return its JSON."""
        out, err = self.start_prep(*arguments).communicate()
        return self._parse(out.decode(), err.decode())

    def _parse(self, out: str, err: str) -> dict[str, Any]:
        assert "secret" not in out + err, "the token leaked"
        return json.loads(out)

    def writes(self) -> list[str]:
        """Return the requests that changed objects other than locks."""
        lines = [line for line in self.store.requests if LOCK_FILE not in line]
        return [line for line in lines if line.startswith(("PUT", "POST", "DELETE"))]


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model `m` of 13 MB and its init `init`."""
    folder = tmp_path_factory.mktemp("home")
    make_checkpoint(folder / "m", vocab_size=4001, hidden_size=256, num_heads=4)
    with chdir(folder):
        run_ok("save-init", "./m", "--mesh", "1,2,2", "--pad-vocab", "8", "--out", "init")
    return folder


@pytest.fixture
def site(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[StoreSite]:
    objects = {f"bucket/models/m/{name}": data for name, data in read_files(home / "m").items()}
    objects |= {f"bucket/init/{name}": data for name, data in read_files(home / "init").items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.001)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "PREP_"))]:
        monkeypatch.delenv(name)
    with serve_objects(objects) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield StoreSite(store, tmp_path, capsys)


SAVE_INIT = ("save-init", "gs://bucket/models/m", "--mesh", "1,2,2", "--pad-vocab", "8")


def test_bucket_folder_converts_like_a_local_one(site: StoreSite, home: Path):
    site.store.faults.rate, site.store.faults.kinds = 0.3, READ_FAULTS
    report = site.run_process(*SAVE_INIT, "--out", "streamed", "--memory", "32MiB")
    assert report["ok"], report
    assert report["memory"]["peak"] <= 32 << 20
    assert sum(map(bool, site.store.faults.injected)) >= 1
    streamed, local = read_files(site.cwd / "streamed"), read_files(home / "init")
    # Streamed files have no modification time.
    timed = {
        "prep-manifest.json",
        "manifest.ocdbt",
        "_CHECKPOINT_METADATA",
    }
    assert {n: d for n, d in streamed.items() if n not in timed} == {
        n: d for n, d in local.items() if n not in timed
    }
    assert site.run_prep("verify", "streamed", str(home / "m"))["ok"]


def test_commands_read_init_from_bucket(site: StoreSite, home: Path):
    site.store.faults.rate, site.store.faults.kinds = 0.2, READ_FAULTS
    report = site.run_prep("inspect", "s3://bucket/init")
    assert (report["ok"], report["source"]["format"]) == (True, "orbax")
    assert site.run_prep(
        "reshard", "s3://bucket/init", "--mesh", "1,4,1", "--out", "wide", "--memory", "32MiB"
    )["ok"]
    assert site.run_prep("export", "gs://bucket/init", "--out", "hf")["ok"]
    for name in ("wide", "hf", "s3://bucket/init"):
        verify_report = site.run_prep("verify", name, str(home / "m"))
        assert (verify_report["ok"], verify_report.get("differences")) == (True, []), verify_report
    assert site.run_prep("verify", "s3://bucket/init")["ok"]


def test_commands_read_and_write_chunk_files_in_a_bucket(
    site: StoreSite, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(orbax_item, "MAX_OPEN_FILES", 3)
    site.store.faults.rate, site.store.faults.kinds = 0.1, READ_FAULTS
    report = site.run_prep(*SAVE_INIT, "--storage", "files", "--out", "gs://bucket/files")
    assert report["ok"], report.get("error")
    site.store.requests.clear()
    report = site.run_prep("inspect", "gs://bucket/files")
    assert report["ok"], report
    chunks = [line for line in site.store.requests if line.endswith("embed.tokens/0.0")]
    assert not chunks, "inspect reads no values"
    words = ("--mesh", "1,4,1", "--out", "wide", "--memory", "32MiB")
    report = site.run_prep("reshard", "gs://bucket/files", *words)
    assert report["ok"], report.get("error")
    for name in ("wide", "gs://bucket/files"):
        assert site.run_prep("verify", name, str(home / "m"))["differences"] == []
    params = prep.load_params("gs://bucket/files")
    assert params["embed"]["tokens"].shape == (4008, 256)
    report = site.run_prep("lock", "gs://bucket/files", "--out", "files.lock.json")
    assert report["ok"], report


def test_transformers_does_not_load_placeholders(site: StoreSite):
    """The placeholder of a weight file is a hole, which reads as zeros."""
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="cannot read gs://bucket/models/m"):
        prep.verify_logits("gs://bucket/models/m", library="transformers")


@pytest.mark.parametrize("name", ["models/m", "init"])
def test_lock_of_a_bucket_has_no_digests_of_its_weight_files(
    site: StoreSite, home: Path, name: str
):
    """Object stores publish none, and the placeholders of weight files are holes."""
    assert site.run_prep("lock", f"gs://bucket/{name}", "--out", "m.lock.json")["ok"]
    files = json.loads(Path("m.lock.json").read_bytes())["files"]
    local = home / Path(name).name
    for file, entry in files.items():
        data = (local / file).read_bytes()
        assert entry["bytes"] == len(data)
        assert entry.get("digest") in (None, hashlib.sha256(data).hexdigest())
    weights = [file for file, entry in files.items() if "digest" not in entry]
    assert weights
    url = f"gs://bucket/{name}"
    locked = ("--lock", "m.lock.json", "--memory", "32MiB")
    command = "reshard" if name == "init" else "save-init"
    assert site.run_prep(command, url, "--mesh", "1,4,1", "--out", "locked", *locked)["ok"]
    changed = bytearray((local / weights[0]).read_bytes())
    changed[-1] ^= 1
    site.store.store(f"bucket/{name}/{weights[0]}", bytes(changed))
    error = site.run_prep(command, url, "--mesh", "1,4,1", "--out", "again", *locked)["error"]
    assert "is damaged" in error["what"]


def test_damaged_small_file_in_bucket_has_a_hint(site: StoreSite):
    site.store.store("bucket/init/hf/config.json", b"{}")
    error = site.run_prep("verify", "gs://bucket/init")["error"]
    assert error["what"] == "gs://bucket/init/hf/config.json is damaged"
    assert error["hint"] == "upload hf/config.json again: `--accept` works on local outputs only"


def test_bucket_output_equals_local_with_manifest_last(site: StoreSite, home: Path):
    report = site.run_prep("save-init", str(home / "m"), *SAVE_INIT[2:], "--out", "gs://bucket/out")
    assert (report["ok"], report["output"]) == (True, "gs://bucket/out")
    objects = site.store.objects_below("bucket/out/")
    assert objects.keys() == read_files(home / "init").keys()
    assert {n: d for n, d in objects.items() if n.startswith("d/")} == {
        n: d for n, d in read_files(home / "init").items() if n.startswith("d/")
    }
    assert site.writes()[-2:] == LAST_WRITES
    assert list(site.cwd.iterdir()) == []
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


def test_existing_bucket_output_is_kept(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), "--out", "s3://bucket/out", "--mesh")
    assert site.run_prep(*arguments, "1,4,1")["already"] is False
    site.store.requests.clear()
    assert site.run_prep(*arguments, "1,4,1")["already"] is True
    error = site.run_prep(*arguments, "1,2,1")["error"]
    assert (error["what"], error["why"]) == (
        "s3://bucket/out already exists",
        "it was made by another request, or of another source",
    )
    assert site.writes() == []
    assert list(site.cwd.iterdir()) == []


def test_overwrite_deletes_bucket_manifest_first(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), "--out", "s3://bucket/out", "--no-scan")
    assert site.run_prep(*arguments[:-1])["ok"]
    site.store.objects["bucket/out/d/old"] = b"x"
    site.store.requests.clear()
    assert site.run_prep(*arguments, "--overwrite")["ok"]
    writes = [line for line in site.writes() if line != "POST bucket"]
    assert writes[:2] == [line.replace("PUT", "DELETE") for line in LAST_WRITES]
    assert writes[-2:] == LAST_WRITES
    assert "bucket/out/d/old" not in site.store.objects
    assert site.run_prep("verify", "s3://bucket/out", str(home / "m"))["ok"]


@pytest.mark.parametrize("address", ["gs://bucket/models/m", "gs://bucket/models", "s3://bucket"])
@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--restart",)])
def test_foreign_bucket_folder_is_never_replaced(
    site: StoreSite, home: Path, address: str, more: tuple[str, ...]
):
    error = site.run_prep("save-init", str(home / "m"), "--out", address, *more)["error"]
    assert error["what"] == f"{address} exists and is something else"
    assert "no prep-manifest.json" in error["why"]
    assert site.writes() == []


def test_failed_bucket_overwrite_resumes(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), *SAVE_INIT[2:], "--out", "gs://bucket/out")
    assert site.run_prep(*arguments, "--no-scan")["ok"]
    site.store.failing_requests = "PUT bucket/out/hf/"
    assert not site.run_prep(*arguments, "--overwrite")["ok"]
    assert "bucket/out/prep-manifest.json" not in site.store.objects
    site.store.failing_requests = "\0"
    assert site.run_prep(*arguments, "--overwrite")["ok"]
    assert site.store.objects_below("bucket/out/").keys() == read_files(home / "init").keys()


def test_failed_upload_resumes(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), *SAVE_INIT[2:], "--out", "gs://bucket/out")
    site.store.failing_requests = "PUT bucket/out/hf/"
    error = site.run_prep(*arguments)["error"]
    assert error["what"] == "cannot write gs://bucket/out"
    assert "bucket/out/commit_success.txt" not in site.store.objects
    assert (site.cwd / "out.upload" / "out").is_dir()
    site.store.failing_requests = "\0"
    site.store.requests.clear()
    assert site.run_prep(*arguments)["ok"]
    assert not [line for line in site.writes() if "/d/" in line]
    assert site.store.objects_below("bucket/out/").keys() == read_files(home / "init").keys()
    assert list(site.cwd.iterdir()) == []


def test_unfinished_upload_does_not_permit_other_urls(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), *SAVE_INIT[2:], "--out")
    site.store.failing_requests = "PUT bucket/out/hf/"
    assert not site.run_prep(*arguments, "gs://bucket/out")["ok"]
    site.store.failing_requests = "\0"
    site.store.objects["bucket/mine/out/thesis"] = b"x"
    site.store.requests.clear()
    error = site.run_prep(*arguments, "gs://bucket/mine/out")["error"]
    assert error["what"] == "gs://bucket/mine/out exists and is something else"
    assert site.writes() == []
    assert site.run_prep(*arguments, "gs://bucket/out")["ok"]


@pytest.mark.parametrize("more", [(), ("--restart",)])
def test_upload_keeps_other_local_files(site: StoreSite, home: Path, more: tuple[str, ...]):
    (site.cwd / "out.upload").mkdir()
    (site.cwd / "out.upload" / "thesis.txt").write_text("mine")
    assert site.run_prep("save-init", str(home / "m"), "--out", "gs://bucket/out", *more)["ok"]
    assert read_files(site.cwd) == {"out.upload/thesis.txt": b"mine"}


def test_killed_upload_resumes(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), *SAVE_INIT[2:], "--out", "s3://bucket/out")
    running = site.start_prep(*arguments)
    wait_until(lambda: any(line.startswith("PUT bucket/out/d/") for line in site.store.requests))
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert "bucket/out/prep-manifest.json" not in site.store.objects
    assert f"bucket/out/{LOCK_FILE}" in site.store.objects
    assert site.run_prep(*arguments)["ok"], "the same command takes the lock over at once"
    assert site.store.objects_below("bucket/out/").keys() == read_files(home / "init").keys()
    assert site.run_prep("verify", "s3://bucket/out", str(home / "m"))["ok"]


def test_concurrent_conversions_to_one_url_write_one_output(site: StoreSite, home: Path):
    """In every interleaving: the other one finds the lock, the objects of a partial output, or the whole output."""
    arguments = (
        "save-init",
        str(home / "m"),
        "--pad-vocab",
        "8",
        "--out",
        "gs://bucket/out",
        "--mesh",
    )
    running = []
    for number, mesh in enumerate(("1,2,2", "1,4,1")):
        folder = site.cwd / str(number)
        folder.mkdir()
        with chdir(folder):
            running.append(site.start_prep(*arguments, mesh))
    reports = [json.loads(process.communicate()[0]) for process in running]
    assert sorted(report["ok"] for report in reports) == [False, True], reports
    loser = next(report["error"]["what"] for report in reports if not report["ok"])
    assert loser.startswith("gs://bucket/out ")
    winner = next(report for report in reports if report["ok"])
    manifest = json.loads(site.store.objects["bucket/out/prep-manifest.json"])
    assert manifest["plan"] == winner["plan_digest"]
    assert not [key for key in site.store.objects if LOCK_FILE in key]
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


def test_a_locked_url_is_refused_before_the_work(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), *SAVE_INIT[2:], "--out", "gs://bucket/out")
    with BucketLock(Bucket(parse_url("gs://bucket/out")), "another plan"):
        error = site.run_prep(*arguments)["error"]
    assert error["what"] == "gs://bucket/out is locked"
    assert f"process {os.getpid()} on " in error["why"]
    assert list(site.cwd.iterdir()) == []
    assert site.writes() == []
    assert site.run_prep(*arguments)["ok"]


def test_workers_write_and_one_process_uploads(site: StoreSite, home: Path):
    report = site.run_process(
        "reshard",
        "gs://bucket/init",
        "--mesh",
        "1,4,1",
        "--out",
        "gs://bucket/out",
        "--workers",
        "2",
        "--memory",
        "512MiB",
    )
    assert report["ok"], report
    assert sum(line == LAST_WRITES[1] for line in site.store.requests) == 1
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


def test_invalid_bucket_requests_are_errors(site: StoreSite, home: Path):
    model = str(home / "m")
    assert site.run_prep("save-init", model, "--out", "abfs://bucket/out")["error"]["code"] == 2
    assert (
        site.run_prep("save-init", model, "--out", "gs://bucket/out", "--processes", "2/0")[
            "error"
        ]["code"]
        == 2
    )
    assert site.run_prep("save-init", "gs://bucket/models/m", "--offline")["error"]["code"] == 2
    assert (
        site.run_prep("inspect", "gs://bucket/models/m", "--revision", "main")["error"]["code"] == 2
    )
    assert (
        site.run_prep("inspect", "gs://bucket/nothing")["error"]["what"]
        == "gs://bucket/nothing holds no checkpoint"
    )
    site.store.objects["bucket/bin/pytorch_model.bin"] = b"x"
    site.store.objects["bucket/bin/config.json"] = b"{}"
    assert (
        site.run_prep("inspect", "gs://bucket/bin")["error"]["what"]
        == "gs://bucket/bin cannot be read remotely"
    )
    dry = site.run_prep("save-init", model, "--out", "gs://bucket/out", "--dry-run")
    assert (dry["ok"], dry["output"]) == (True, "gs://bucket/out")
    assert site.writes() == []
    assert list(site.cwd.iterdir()) == []
