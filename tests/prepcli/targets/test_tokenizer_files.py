"""The tokenizer files of the steps of `prep train`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, STOPPED
from prepcli.formats.manifest import step_folder
from prepcli.planning.plan import SmallFile
from prepcli.sources.side_files import find_side_files
from prepcli.targets.hf_folder import copied_files, tokenizer_folder, with_tokenizer
from tests.helpers.shared_steps import share_steps
from tests.helpers.slow_cases import slow_except
from tests.helpers.training_folder import WORDS, make_training_folder, write_tokenizer

MODEL_FILES = {
    "tokenizer.json": "{}",
    "vocab.json": "[]",
    "tokenizer_config.json": "model",
    "chat_template.jinja": "model",
    "generation_config.json": "{}",
    "LICENSE": "text",
}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module", autouse=True)
def shared_steps() -> Iterator[None]:
    """Compile the steps of runs with equal setups once."""
    with share_steps():
        yield


@pytest.fixture
def files(tmp_path: Path) -> tuple[SmallFile, ...]:
    folder = write_files(tmp_path / "model", MODEL_FILES)
    return copied_files(find_side_files(folder).copied, folder, path_prefix="hf/")


def texts(files: tuple[SmallFile, ...]) -> dict[str, str]:
    return {file.path.removeprefix("hf/"): Path(file.copied_from).read_text() for file in files}


@pytest.mark.parametrize("name", [None, "model", "model/tokenizer.json", "copy", "copy/bpe.json"])
def test_tokenizer_of_the_model_changes_no_file(
    tmp_path: Path, files: tuple[SmallFile, ...], name: str | None
):
    write_files(tmp_path / "copy", {"tokenizer.json": "{}", "bpe.json": "{}"})
    assert with_tokenizer(files, None if name is None else str(tmp_path / name)) == files


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({"tokenizer.json": "[1]"}, ""),
        (
            {
                "tokenizer.json": "{}",
                "tokenizer_config.json": "other",
                "generation_config.json": "[]",
            },
            "",
        ),
        ({"tokenizer.model": "sp"}, "tokenizer.model"),
        ({"vocab.json": "[]", "merges.txt": ""}, ""),
        ({"vocab.txt": "a"}, ""),
    ],
)
def test_given_tokenizer_replaces_the_model_tokenizer(
    tmp_path: Path, files: tuple[SmallFile, ...], named: dict[str, str], name: str
):
    folder = write_files(tmp_path / "other", named)
    expected = {**named, "generation_config.json": "{}", "LICENSE": "text"}
    assert texts(with_tokenizer(files, str(folder / name))) == expected


def test_named_tokenizer_file_may_be_a_link(tmp_path: Path, files: tuple[SmallFile, ...]):
    target = write_files(tmp_path / "other", {"tokenizer.json": "[1]"}) / "tokenizer.json"
    link = write_files(tmp_path / "links", {"tokenizer_config.json": "linked"}) / "bpe.json"
    link.symlink_to(target)
    expected = {
        "tokenizer.json": "[1]",
        "tokenizer_config.json": "linked",
        "generation_config.json": "{}",
    }
    assert texts(with_tokenizer(files, str(link))) == {**expected, "LICENSE": "text"}


def test_folder_of_the_config_may_have_a_sentencepiece_model(tmp_path: Path):
    folder = write_files(tmp_path / "model", {"tokenizer.model": ""})
    assert tokenizer_folder(None, f"{folder}/config.json") == folder


def test_merged_adapter_keeps_the_tokenizer_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    Path("other").mkdir()
    write_tokenizer(Path("other"), WORDS[::-1])
    words = [
        "train",
        "recipe.toml",
        "--out",
        "run",
        "-q",
        "--set",
        "data.tokenizer=other",
        "--set",
        "lora.rank=2",
    ]
    words += ["--set", "train.steps=3", "--set", "checkpoint.every=1"]
    assert main([*words, "--stop-after", "1"]) == STOPPED
    assert main(words) == OK
    assert main(["export", "run", "--out", "adapter", "-q"]) == OK
    assert main(["merge", "adapter", "tiny", "--out", "merged", "-q"]) == OK
    tokenizer = Path("other/tokenizer.json").read_bytes()
    for folder in (step_folder(Path("run"), 3) / "state" / "hf", Path("adapter"), Path("merged")):
        assert (folder / "tokenizer.json").read_bytes() == tokenizer
    Path("adapter/prep-manifest.json").unlink()
    assert main(["merge", "adapter", "tiny", "--out", "merged", "--overwrite", "-q"]) == OK
    assert Path("merged/tokenizer.json").read_bytes() == Path("tiny/tokenizer.json").read_bytes(), (
        "PEFT's adapter"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", slow_except(["tiny", "tiny-init"], ["tiny"]))
def test_steps_keep_the_tokenizer_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    Path("other").mkdir()
    write_tokenizer(Path("other"), WORDS[::-1])
    words = ["train", "recipe.toml", "--out", "run", "-q", "--set", f"model.path={model}"]
    words += [
        "--set",
        "data.tokenizer=other",
        "--set",
        "train.steps=3",
        "--set",
        "checkpoint.every=1",
    ]
    assert main([*words, "--stop-after", "1"]) == STOPPED
    assert main(words) == OK
    assert main(["export", "run", "--out", "exported", "-q"]) == OK
    tokenizer = Path("other/tokenizer.json").read_bytes()
    for folder in (step_folder(Path("run"), 3) / "state" / "hf", Path("exported")):
        assert (folder / "tokenizer.json").read_bytes() == tokenizer
