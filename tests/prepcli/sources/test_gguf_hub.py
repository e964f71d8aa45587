"""GGUF files of repositories on the hub, served by a fake hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fork_server import run_python
from tests.helpers.gguf_files import make_gguf
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except

gguf = lazy_module("gguf")
SCRIPT = "import sys; from prepcli.commands.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> FakeRepo:
    """Return a repository with a file, and with a model in parts in a folder."""
    folder = tmp_path_factory.mktemp("gguf")
    make_gguf(folder / "m-Q8.gguf", "llama")
    make_gguf(folder / "p.gguf", "llama", tensors_per_part=7)
    files = {"m-Q8.gguf": (folder / "m-Q8.gguf").read_bytes()}
    for path in folder.glob("p-*.gguf"):
        files[f"parts/{path.name}"] = path.read_bytes()
    return FakeRepo(files)


def run(repo: FakeRepo, work: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Run prep with a fake hub. Return its exit code, its messages and the files that it has requested."""
    with serve_hub({"o/m": repo}) as hub:
        result = run_python(SCRIPT, *arguments, env=hub.environment(work / "home"), cwd=work)
        requests = [request for request in hub.requests if ".gguf" in request]
    return result.returncode, result.stderr, requests


def test_file_of_a_repository_is_converted(repo: FakeRepo, tmp_path: Path):
    arguments = ("save-init", "o/m/m-Q8.gguf", "--quantized", "dequantize")
    code, error, requests = run(repo, tmp_path, *arguments)
    assert code == 0, error
    assert (tmp_path / "m-Q8-init/prep-manifest.json").exists()
    assert not any("parts" in request for request in requests)
    # The cache has the file.
    code, error, requests = run(repo, tmp_path, *arguments, "--out", "again", "--offline")
    assert code == 0, error
    assert not requests


@pytest.mark.slow
def test_all_parts_in_a_folder_are_downloaded(repo: FakeRepo, tmp_path: Path):
    name = next(name for name in repo.files if "-00001-of-" in name)
    code, error, requests = run(
        repo, tmp_path, "save-init", f"o/m/{name}", "--quantized", "dequantize", "--out", "init"
    )
    assert code == 0, error
    fetched = {request.rpartition("/")[2] for request in requests}
    assert fetched == {Path(name).name for name in repo.files if "parts" in name}


def test_unknown_file_is_an_error_that_lists_the_others(repo: FakeRepo, tmp_path: Path):
    code, error, _ = run(repo, tmp_path, "save-init", "o/m/m-Q4.gguf", "--quantized", "dequantize")
    assert code == 1
    assert "o/m has no m-Q4.gguf" in error
    assert "m-Q8.gguf" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_except(["m-Q8.gguf", "parts/p-00001-of"], ["parts/p-00001-of"])
)
def test_streamed_file_has_the_bytes_of_a_downloaded_one(repo: FakeRepo, tmp_path: Path, name: str):
    file = next(file for file in repo.files if file.startswith(name))
    for out, more in (("streamed", ["--stream"]), ("downloaded", [])):
        arguments = ("save-init", f"o/m/{file}", "--quantized", "dequantize", "--storage", "files")
        code, error, requests = run(repo, tmp_path, *arguments, "--out", out, *more)
        assert code == 0, error
        assert requests
        assert bool(more) == (not list((tmp_path / "home").rglob("*.gguf")))
    chunks = [path for path in (tmp_path / "downloaded").rglob("0*") if path.is_file()]
    assert chunks
    for path in chunks:
        streamed = tmp_path / "streamed" / path.relative_to(tmp_path / "downloaded")
        assert streamed.read_bytes() == path.read_bytes()


def test_local_folder_with_the_owners_name_means_a_path(tmp_path: Path):
    (tmp_path / "o").mkdir()
    code, error, _ = run(FakeRepo(), tmp_path, "inspect", "o/m/x.gguf")
    assert code == 2
    assert "more than one `/`" in error
