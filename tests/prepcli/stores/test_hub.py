"""Tests of downloads by huggingface_hub from a fake hub, in subprocesses."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from prepcli.sources.remote_folders import files_to_download
from tests.helpers.adapters import ALPHA, RANK, make_adapter
from tests.helpers.fork_server import run_python
from tests.helpers.hub_server import COMMIT, FakeHub, FakeRepo, hub_environment, serve_hub
from tests.helpers.slow_cases import slow_except

pytestmark = pytest.mark.waits

WEIGHTS = save({"a": np.arange(3000, dtype=np.float32)})
GOOD = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "original/params.json": b"not wanted",
    "original/consolidated.00.pth": b"not wanted",
    "README.md": b"not wanted",
}
CODES = save({"a.qweight": np.arange(3000, dtype=np.int32)})
SETTINGS = {"config.json": b'{"quantization_config": {"quant_method": "gptq"}}'}
SETTINGS_FILE = {"quantize_config.json": b'{"bits": 4}'}
REPOS = {
    "o/good": FakeRepo(GOOD),
    "o/flax": FakeRepo(
        {"config.json": b"{}", "flax_model.msgpack": b"x", "tf_model.h5": b"not wanted"}
    ),
    "o/bin": FakeRepo(
        {"config.json": b"{}", "pytorch_model.bin": b"x", "training_args.bin": b"not wanted"}
    ),
    "o/meta": FakeRepo(
        {"consolidated.00.pth": b"x", "params.json": b"{}", "tokenizer.model": b"x"}
    ),
    "o/gguf": FakeRepo({"m-Q4.gguf": b"x", "README.md": b""}),
    "o/lora": FakeRepo({"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}),
    "o/empty": FakeRepo({"README.md": b""}),
    "o/gptq": FakeRepo({**GOOD, **SETTINGS, "model.safetensors": CODES}),
    "o/older": FakeRepo({**GOOD, **SETTINGS_FILE, "model.safetensors": CODES}),
    "o/decoded": FakeRepo({**GOOD, **SETTINGS}),
    "o/decoded-older": FakeRepo({**GOOD, **SETTINGS_FILE}),
    "o/huge": FakeRepo(GOOD, sizes={"model.safetensors": 1 << 60}),
    "o/gated": FakeRepo(status=401, error_code="GatedRepo"),
    "o/refused": FakeRepo(status=403, error_code="GatedRepo"),
    "o/private": FakeRepo(status=401),
    "o/ill": FakeRepo(status=503),
    "o/long": FakeRepo(GOOD, num_surplus=1000),
}
LOOKED_FOR = "looked for *.safetensors, *.bin, *.pth, *.pt, *.msgpack, *.distcp, Orbax `_METADATA`, EasyLM stream"
SCRIPT = """
import io, json, os, sys
from prepcli.sources.open_folder import Access
from prepcli.sources.locate import locate
from prepcli.core.errors import PrepError
from prepcli.commands.console.progress_displays import JsonProgress
from prepcli.stores.byte_ranges import retry_policy_from_env
names, is_offline = json.loads(sys.argv[1]), "--offline" in sys.argv
for name in names:
    warnings, events = [], io.StringIO()
    answer = {"warnings": warnings}
    try:
        policy = retry_policy_from_env(os.environ, str)
        options = {"offline": is_offline, "progress": JsonProgress(events), "retry_policy": policy}
        located = locate(name, access=Access(warn=warnings.append, **options))
        local_files = located.files
        answer |= {"path": str(local_files.path), "revision": local_files.commit, "kind": located.kind}
    except PrepError as error:
        answer |= {"error": [error.what, error.why, error.hint, error.code]}
    answer["events"] = [json.loads(line) for line in events.getvalue().splitlines()]
    print(json.dumps(answer))
"""
ADAPTER_SCRIPT = """
import json, sys
from prepcli.inspection.contents import read_contents
from prepcli.sources.open_folder import Access
from prepcli.sources.locate import locate
contents = read_contents(locate(sys.argv[1], access=Access(allow_adapters=True)))
print(json.dumps([contents.adapter, contents.non_arrays]))
"""
Answer = dict[str, object]


@dataclass(frozen=True)
class LocateRunner:
    """Callable that runs `locate` in a subprocess with environment variables."""

    variables: dict[str, str]
    cwd: Path

    def __call__(self, name: str, *options: str, **variables: str) -> Answer:
        (answer,) = self.locate_all([name], *options, **variables)
        return answer

    def locate_all(self, names: Sequence[str], *options: str, **variables: str) -> list[Answer]:
        """Locate several models, one after another in one process."""
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
        }
        environment = {**inherited, **self.variables, **variables}
        process = run_python(SCRIPT, json.dumps(names), *options, cwd=self.cwd, env=environment)
        assert (process.returncode, process.stderr) == (0, "")
        return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with serve_hub(REPOS) as hub:
        yield hub


@pytest.fixture
def run_locate(hub: FakeHub, tmp_path: Path) -> LocateRunner:
    """Return a runner with an empty cache. Clear the hub's list of requests."""
    hub.requests.clear()
    return LocateRunner(hub.environment(tmp_path / "home"), tmp_path)


def check_download_events(events: object) -> None:
    """Check that the progress of a download is in bytes."""
    assert isinstance(events, list)
    nbytes = len(WEIGHTS) + len(GOOD["tokenizer.json"])  # config.json is fetched before
    assert [(event["event"], event["task"], event["done"], event["total"]) for event in events] == [
        ("begin", "download", 0, nbytes), ("end", "download", nbytes, nbytes),
    ]  # fmt: skip


def test_download_fetches_only_needed_files(run_locate: LocateRunner, hub: FakeHub) -> None:
    answer = run_locate("o/good")
    check_download_events(answer["events"])
    path = Path(str(answer["path"]))
    assert (answer["kind"], answer["revision"], answer["warnings"]) == ("safetensors", COMMIT, [])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        name: GOOD[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert not [request for request in hub.requests if "README" in request or ".bin" in request]


@pytest.mark.slow
def test_download_reuses_the_cache(run_locate: LocateRunner, hub: FakeHub) -> None:
    first = run_locate("o/good")
    hub.requests.clear()
    second = run_locate("o/good")
    assert (second["path"], second["events"]) == (first["path"], [])
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_offline_uses_the_cache_without_requests(run_locate: LocateRunner, hub: FakeHub) -> None:
    first = run_locate("o/good")
    hub.requests.clear()
    assert run_locate("o/good", "--offline")["path"] == first["path"]
    assert run_locate("o/good", HF_HUB_OFFLINE="1")["path"] == first["path"]
    assert hub.requests == []


def test_offline_fails_without_a_cached_model(run_locate: LocateRunner, hub: FakeHub) -> None:
    expected = [
        "cannot read o/good",
        "no such folder here, not in the cache and HF_HUB_OFFLINE=1",
        "check the name, or run once with network",
        1,
    ]
    assert run_locate("o/good", "--offline")["error"] == expected
    assert run_locate("o/good", HF_HUB_OFFLINE="1")["error"] == expected
    assert hub.requests == []


@pytest.mark.slow
def test_offline_fails_if_cached_weights_are_missing(run_locate: LocateRunner) -> None:
    path = Path(str(run_locate("o/good")["path"]))
    (path / "model.safetensors").unlink()
    assert run_locate("o/good", "--offline")["error"] == [
        "cannot read o/good",
        "no such folder here, not in the cache and HF_HUB_OFFLINE=1",
        "check the name, or run once with network",
        1,
    ]


def test_download_uses_the_requested_revision(run_locate: LocateRunner) -> None:
    good, unknown = run_locate.locate_all([f"o/good@{COMMIT}", "o/good@v9"])
    assert good["revision"] == COMMIT
    assert unknown["error"] == [
        "o/good has no revision `v9`",
        "HTTP 404 from the hub",
        "see its page for revisions",
        1,
    ]


def flip_byte(content: bytes) -> bytes:
    """Return the content with another byte in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("name", "digest"),
    slow_except(
        [
            ("model.safetensors", f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"),
            ("tokenizer.json", "git:9e26dfeeb6e641a33dae4961196235bdb965b21b"),  # git hash-object
            ("config.json", "git:"),
        ],
        [("tokenizer.json", "git:9e26dfeeb6e641a33dae4961196235bdb965b21b")],
    ),
)
def test_damaged_download_is_refused_and_deleted(tmp_path: Path, name: str, digest: str) -> None:
    files = {**GOOD, "tokenizer.json": b"{}"}
    large = ("model.safetensors",)
    damaged = FakeRepo(files, large=large, damaged={name: flip_byte(files[name])})
    with serve_hub({"o/good": damaged}) as hub:
        error = LocateRunner(hub.environment(tmp_path / "home"), tmp_path)("o/good")["error"]
    assert isinstance(error, list)
    what, why, hint, code = error
    assert what == f"{name} of o/good is damaged"
    assert why.startswith(f"the hub lists {digest}")
    assert hint == "run the same command again: the file is downloaded again"
    assert code == 1
    with serve_hub({"o/good": FakeRepo(files, large=large)}) as hub:
        answer = LocateRunner(hub.environment(tmp_path / "home"), tmp_path)("o/good")
        assert Path(str(answer["path"]), name).read_bytes() == files[name]
    assert f"GET /o/good/resolve/{COMMIT}/{name}" in hub.requests


def test_download_explains_http_errors(run_locate: LocateRunner, hub: FakeHub) -> None:
    page, then = hub.url, "then `hf auth login`, or set HF_TOKEN"
    expected = {
        "o/gated": ["cannot read o/gated", "HTTP 401 from the hub: access must be granted to your account",
                    f"accept its licence at {page}/o/gated, {then}", 1],
        "o/refused": ["cannot read o/refused", "HTTP 403 from the hub: access must be granted to your account",
                      f"accept its licence at {page}/o/refused, {then}", 1],
        "o/private": ["cannot read o/private", "HTTP 401 from the hub: it is private, or there is no such model",
                      f"check {page}/o/private, {then}", 1],
        "o/nothing": ["cannot read o/nothing", "not a folder here, and HTTP 404 from the hub: there is no such model",
                      "check the spelling", 1],
        "o/ill": ["cannot read o/ill", "HTTP 503 from the hub",
                  "try again later; a download continues where it stopped", 1],
        "o/long": ["cannot read o/long", "a file has a different number of bytes than the hub announced",
                   "try again; a proxy may have changed the answer", 1],
        "o/empty": ["`o/empty` holds no checkpoint", f"{LOOKED_FOR}; found README.md",
                    "name the folder with the weights", 1],
    }  # fmt: skip
    answers = run_locate.locate_all([*expected], PREP_TIMEOUT="5")  # retries of HTTP 503 wait 3.5 s
    assert {name: answer["error"] for name, answer in zip(expected, answers)} == expected


def test_unsupported_model_fails_before_the_download(
    run_locate: LocateRunner, hub: FakeHub, tmp_path: Path
) -> None:
    expected = {
        "o/gguf": "o/gguf is in GGUF format",
        "o/lora": "o/lora is an adapter, not a model",
        "o/gptq": "o/gptq is quantised",
        "o/older": "o/older is quantised",
        "o/huge": "not enough room for o/huge",
    }
    errors: list[Any] = [answer["error"] for answer in run_locate.locate_all([*expected])]
    assert [error[0] for error in errors] == [*expected.values()]
    assert {error[3] for error in errors} == {1}
    # Only the headers of the models with quantisation settings are read, and nothing of them is kept.
    for request in hub.requests:
        if "/resolve/" in request and "config.json" not in request:
            assert "/o/gptq/" in request or "/o/older/" in request
    assert not [*tmp_path.rglob("*.safetensors")]
    assert errors[-1][1].startswith(f"needs 1048576.00 TiB, {tmp_path / 'home' / 'hub'} has ")
    assert errors[-1][1].endswith(" free")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["o/decoded", "o/decoded-older"], ["o/decoded"]))
def test_left_over_quantisation_settings_are_ignored(run_locate: LocateRunner, name: str) -> None:
    answer = run_locate(name)
    assert answer["kind"] == "safetensors"
    assert Path(str(answer["path"]), "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("settings", slow_except([SETTINGS, SETTINGS_FILE], [SETTINGS_FILE]))
def test_tensors_of_torch_files_decide_about_quantisation(
    tmp_path: Path, settings: dict[str, bytes]
) -> None:
    torch = pytest.importorskip("torch")
    repos: dict[str, FakeRepo] = {}
    for name, dtype in (("o/dense", torch.float32), ("o/codes", torch.int32)):
        weights = io.BytesIO()
        torch.save({"a.weight": torch.ones(8, dtype=dtype)}, weights)
        files = {"config.json": b"{}", **settings, "pytorch_model.bin": weights.getvalue()}
        repos[name] = FakeRepo(files)
    with serve_hub(repos) as hub:
        run_locate = LocateRunner(hub.environment(tmp_path / "home"), tmp_path)
        dense, codes = run_locate.locate_all([*repos])
    assert dense["kind"] == "torch"
    error: Any = codes["error"]
    assert error[0] == "o/codes is quantised"


def test_unreachable_hub_is_an_error(tmp_path: Path) -> None:
    with serve_hub({}) as stopped:
        pass
    error = LocateRunner(hub_environment(stopped.url, tmp_path), tmp_path)("o/good")["error"]
    assert error == [
        "cannot read o/good",
        f"the hub cannot be reached at HF_ENDPOINT={stopped.url}, and the model is not in the cache",
        "check the network, or name a local folder",
        1,
    ]


@pytest.mark.parametrize(
    "trouble", [pytest.param({}, marks=pytest.mark.slow), {"o/good": FakeRepo(status=503)}]
)
def test_unreachable_hub_falls_back_to_the_cache_and_warns(
    tmp_path: Path, trouble: dict[str, FakeRepo]
) -> None:
    home = tmp_path / "home"
    with serve_hub(REPOS) as hub:
        path = LocateRunner(hub.environment(home), tmp_path)("o/good")["path"]
    with serve_hub(trouble) as failing_hub:
        url = failing_hub.url if trouble else hub.url
        answer = LocateRunner(hub_environment(url, home), tmp_path)("o/good", PREP_TIMEOUT="0.5")
    assert answer["path"] == path
    assert answer["warnings"] == [
        f"the hub cannot be reached: using o/good as it is in the cache, commit {COMMIT}"
    ]


def test_download_selects_other_formats_without_safetensors(run_locate: LocateRunner) -> None:
    expected = {
        "o/bin": ("torch", ["config.json", "pytorch_model.bin"]),
        "o/meta": ("meta", ["consolidated.00.pth", "params.json", "tokenizer.model"]),
        "o/flax": ("flax", ["config.json", "flax_model.msgpack"]),
    }
    for options in ((), ("--offline",)):
        answers = run_locate.locate_all([*expected], *options)
        for answer, (kind, files) in zip(answers, expected.values()):
            assert answer["kind"] == kind
            assert sorted(path.name for path in Path(str(answer["path"])).iterdir()) == files


@pytest.mark.slow
def test_index_of_an_earlier_save_is_left_on_the_hub(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors": b"whole",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00001.safetensors": b"earlier",
    }
    with serve_hub({"o/saved-twice": FakeRepo(files)}) as hub:
        environment = hub.environment(tmp_path / "home")
        path = Path(str(LocateRunner(environment, tmp_path)("o/saved-twice")["path"]))
    assert (path / "model.safetensors").exists()
    assert not (path / "model-00001-of-00001.safetensors").exists()


def test_files_to_download_selects_one_format() -> None:
    small = ["config.json", "generation_config.json", "tokenizer_config.json", "merges.txt"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = ["pytorch_model.bin", "flax_model.msgpack", "onnx/model.onnx", "LICENSE"]
    index = "model.safetensors.index.json"
    assert files_to_download([*small, *shards, index, *others]) == sorted([*small, *shards, index])
    assert files_to_download([*small, "model.safetensors", *others]) == sorted(
        [*small, "model.safetensors"]
    )
    named = [*small, "weights.safetensors"]
    assert files_to_download([*named, *others]) == sorted(named)
    assert files_to_download(["sub/config.json", "sub/model.safetensors"]) == []
    renamed = ["model-1.safetensors", "model-2.safetensors", index]
    assert files_to_download(renamed) == renamed
    bins = [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]
    assert files_to_download([*small, *bins, "model.h5"]) == sorted([*small, *bins])
    assert files_to_download(["pytorch_model.bin", "consolidated.00.pth", "x.gguf"]) == [
        "pytorch_model.bin"
    ]
    flax = ["flax_model-00001-of-00001.msgpack", "flax_model.msgpack.index.json"]
    assert files_to_download([*flax, "tf_model.h5"]) == flax
    assert files_to_download([*flax, "flax_model.msgpack"]) == ["flax_model.msgpack"]
    meta = ["consolidated.00.pth"]
    assert files_to_download([*meta, "params.json", "checklist.chk"]) == meta
    assert files_to_download(["x.gguf", "imatrix.bin", "training_args.bin"]) == []


def test_adapter_is_downloaded_with_its_settings(tmp_path: Path):
    adapter = tmp_path / "adapter"
    make_adapter(adapter, {"model.layers.0.self_attn.q_proj": (8, 8)})
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    with serve_hub({"o/adapter": FakeRepo({**files, "README.md": b"not wanted"})}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        process = run_python(ADAPTER_SCRIPT, "o/adapter", cwd=tmp_path, env=environment)
    assert (process.returncode, process.stderr) == (0, "")
    settings, remarks = json.loads(process.stdout)
    assert (settings["rank"], settings["alpha"], remarks) == (RANK, ALPHA, [])
