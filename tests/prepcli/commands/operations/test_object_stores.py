"""Commands that read checkpoints from object stores and write to them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.core.errors import UsageError
from prepcli.sources.openers import orbax_item
from tests.helpers.golden_inputs import provide
from tests.helpers.slow_cases import slow_except
from tests.helpers.store_sites import StoreSite, read_files

pytestmark = pytest.mark.waits

READ_FAULTS = ("drop", "empty", "refuse", "busy", "limit", "short")


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


@pytest.mark.parametrize("words", [(), pytest.param(("--format", "dcp"), marks=pytest.mark.slow)])
def test_inspect_of_an_export_reads_no_weights(site: StoreSite, home: Path, words: tuple[str, ...]):
    report = site.run_prep("export", str(home / "init"), "--out", "out", *words)
    assert report["ok"], report
    for path, data in read_files(site.cwd / "out").items():
        site.store.objects[f"bucket/out/{path}"] = data
    site.store.sent.clear()
    report = site.run_prep("inspect", "gs://bucket/out")
    assert report["ok"], report
    # The files of weights have 13 MB, and are smaller than the limit of files to fetch whole.
    assert sum(sent.stop - sent.start for sent in site.store.sent) < 2 << 20


def test_verify_requests_each_small_file_once(site: StoreSite, home: Path):
    site.store.requests.clear()
    assert site.run_prep("verify", "gs://bucket/models/m", str(home / "m"))["ok"]
    small = [path.name for path in (home / "m").glob("*.json")]
    assert "generation_config.json" in small
    for name in small:
        assert site.store.requests.count(f"GET bucket/models/m/{name}") == 1, name


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


FORMATS = {
    "torch": ("torch",),
    "torch-sharded": ("torch-sharded",),
    "meta": ("meta",),
    "gguf": ("model.gguf", "--quantized", "dequantize"),
    "flax": ("flax",),
    "flax-sharded": ("flax-sharded",),
    "flax-t5": ("flax-t5",),
    "easylm": ("easylm-stream", "--config", "./easylm-config"),
    "dcp": ("dcp-plain", "--verbatim"),
    "mxfp4": ("q-mxfp4", "--quantized", "dequantize"),
    "multimodal": ("llava",),
    "prediction": ("prediction",),
    "verbatim": ("verbatim",),
}


@pytest.mark.parametrize("name", slow_except(FORMATS, ("torch", "gguf", "flax", "easylm", "dcp")))
def test_every_format_is_read_from_a_bucket(site: StoreSite, name: str):
    source, *options = FORMATS[name]
    for path in (source, *(["easylm-config"] if "--config" in options else [])):
        provide(path)
    local = Path(source)
    for path in [local] if local.is_file() else local.rglob("*"):
        if path.is_file():
            site.store.store(f"bucket/in/{path.as_posix()}", path.read_bytes())
    words = ("--storage", "files", "--memory", "64MiB", *options)
    report = site.run_prep("save-init", f"./{source}", "--out", "from-disk", *words)
    assert report["ok"], report.get("error")
    site.store.faults.rate, site.store.faults.kinds = 0.1, READ_FAULTS
    report = site.run_prep("save-init", f"gs://bucket/in/{source}", "--out", "streamed", *words)
    assert report["ok"], report.get("error")
    streamed, read = read_files(Path("streamed")), read_files(Path("from-disk"))
    assert streamed.keys() == read.keys()
    different = {file for file in read if streamed[file] != read[file]}
    # Both have the time of the command or of the source.
    assert different <= {"prep-manifest.json", "_CHECKPOINT_METADATA"}
    shown = site.run_prep("inspect", f"gs://bucket/in/{source}")
    assert shown["ok"], shown.get("error")
    assert shown["tensors"]


def test_transformers_does_not_load_a_url(site: StoreSite):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="cannot read gs://bucket/models/m"):
        prep.verify_logits("gs://bucket/models/m", library="transformers")


@pytest.mark.parametrize("name", ["models/m", "init"])
def test_lock_of_a_bucket_has_no_digests_of_its_weight_files(
    site: StoreSite, home: Path, name: str
):
    """Object stores publish none."""
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


def test_invalid_bucket_requests_are_errors(site: StoreSite, home: Path):
    model = str(home / "m")
    assert site.run_prep("save-init", model, "--out", "abfs://bucket/out")["error"]["code"] == 2
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
        == "pytorch_model.bin is not a PyTorch file"
    )
    dry = site.run_prep("save-init", model, "--out", "gs://bucket/out", "--dry-run")
    assert (dry["ok"], dry["output"]) == (True, "gs://bucket/out")
    assert site.writes() == []
    assert list(site.cwd.iterdir()) == []
