"""Pointers of Git LFS in place of files: each command names the file and the command that gets it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 17209961\n"
)
WEIGHTS = "model.safetensors"
# Files beside the weights, and files in place of them.
SIDE_FILES = (
    *("config.json", "tokenizer.json", "tokenizer.model", "generation_config.json", "vocab.json"),
    *("tokenizer_config.json", "chat_template.jinja", "README.md"),
)
WEIGHT_FILES = (
    *(WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("flax_model.msgpack", "consolidated.00.pth"),
)


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA, files=1)


def check_error(capsys: pytest.CaptureFixture[str], *command: str, file: str) -> None:
    """Assert that a command ends with the error for a pointer."""
    capsys.readouterr()
    assert main([*command]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    what, why, hint = captured.err.strip().splitlines()[-3:]
    assert what.endswith(f"{file} is a Git LFS pointer")
    assert why.strip() == "why: it only refers to the real file"
    assert hint.strip() == "hint: run `git lfs pull`"


@pytest.mark.parametrize("name", slow_except(SIDE_FILES, ("config.json", "tokenizer.model")))
def test_pointers_beside_the_weights_are_not_converted(
    name: str, capsys: pytest.CaptureFixture[str]
):
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=name)
    check_error(capsys, "pad-vocab", "./m", "--multiple", "8", "--out", "padded", file=name)
    check_error(capsys, "lock", "./m", "--out", "lock.json", file=name)
    assert sorted(path.name for path in Path().iterdir()) == ["m"]


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_pointers_in_place_of_weights_are_named(name: str, capsys: pytest.CaptureFixture[str]):
    Path("m", WEIGHTS).unlink()
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=name)
    check_error(capsys, "inspect", "./m", file=name)


def test_pointer_in_place_of_one_shard_is_named(capsys: pytest.CaptureFixture[str]):
    shutil.rmtree("m")
    make_checkpoint(Path("m"), LLAMA, files=3)
    shard = sorted(Path("m").glob("*.safetensors"))[-1]
    shard.write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=shard.name)


@pytest.mark.parametrize(
    "name",
    slow_except(("x.gguf", "x.safetensors", "x.pt", "x.msgpack", "stream"), ("x.gguf", "x.pt")),
)
def test_pointer_in_place_of_a_single_file_is_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(POINTER)
    check_error(capsys, "save-init", f"./{name}", "--out", "init", file=name)
    options = ("--quantized", "dequantize", "--out", "init")
    check_error(capsys, "save-init", f"./{name}", *options, file=name)
    check_error(capsys, "inspect", f"./{name}", file=name)
    check_error(capsys, "verify", f"./{name}", "./m", file=name)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_pointer_in_place_of_a_tokenizer_is_named(name: str, capsys: pytest.CaptureFixture[str]):
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "generate", "./m", "--prompt", "x", file=name)
    Path("text.txt").write_text("x\n")
    check_error(capsys, "eval", "./m", "--data", "text.txt", file=name)
    Path("tokens.txt").write_text("<new>\n")
    options = ("--tokens", "tokens.txt", "--out", "more")
    check_error(capsys, "add-tokens", "./m", *options, file=name)
