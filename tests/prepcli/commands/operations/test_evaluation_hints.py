"""Hints of `prep eval` name its options, not tables of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.compute_options import option_of_key
from prepcli.core.errors import USAGE, Key, Style, text
from tests.helpers.run_cli import error_lines, run_json
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.training_folder import write_tokenizer

PAIRS = ("--fields", "[prompt], text")
SPANS = ("--set", "data.objective=span_corruption")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, config in (("llama", LLAMA), ("t5", FAMILY_CONFIGS["t5"])):
        make_checkpoint(Path(name), config)
        write_tokenizer(Path(name))
    Path("a.jsonl").write_text('{"prompt": "w1 w2", "text": "w1 w2 w3"}\n' * 50)
    Path("a.txt").write_text("w1 w2 w3 " * 50)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["t5", "--data", "a.jsonl", *PAIRS], "`--set data.source_length=512`"),
        (["t5", "--data", "a.jsonl", *SPANS], "`--set data.source_length=512`"),
        (
            ["t5", "--data", "a.jsonl"],
            "`--type json` and `--fields '[article], summary'`, or `--set data.objective=span_corruption`",
        ),
        (["llama", "--data", "a.jsonl", "--set", "data.source_length=4"], "remove it"),
        (
            ["llama", "--data", "a.jsonl", "--set", "data.noise_density=0.3"],
            "`--set data.objective=span_corruption`",
        ),
        (["llama", "--data", "a.jsonl", "--fields", "body"], "`--fields text`"),
        (["llama", "--data", "a.txt", "--fields", "body"], "`--type` sets the type of the files"),
        (["llama", "--data", "a.txt", "--type", "text", "--fields", "body"], "`--type json`"),
        (["llama", "--data", "a.txt", "--type", "foo"], "`--type text`"),
        (["llama", "--data", "a.txt", "--set", "data.nope=1"], "did you mean `--type`?"),
        (["llama", "--data", "a.jsonl", "--tokenizer", "none"], "`--tokenizer PATH`"),
        (
            ["llama", "--data", "a.jsonl", "--seq-length", "4000"],
            "add more text, or `--seq-length 200`",
        ),
        (
            ["llama", "--data", "a.jsonl", "--set", "model.attention_kernel=cudnn"],
            "`--set model.attention_kernel=auto`",
        ),
    ],
)
def test_hints_of_eval_name_its_options(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    assert error_lines(capsys, "eval", *words)[2] == f" hint: {hint}"


def test_each_of_several_errors_names_options(capsys: pytest.CaptureFixture[str]):
    words = (*SPANS, "--set", "data.always_start_with_bos=true")
    assert main(["eval", "t5", "--data", "a.jsonl", *words]) == USAGE
    error = capsys.readouterr().err
    assert "prep eval has 2 errors" in error
    assert "`--set data.source_length=512`" in error
    assert "in [data]" not in error


def test_hints_of_evaluate_name_its_arguments():
    with pytest.raises(prep.PrepError) as raised:
        prep.evaluate("llama", "a.jsonl", fields="body")
    assert raised.value.hint == '`fields="text"`'
    with pytest.raises(prep.PrepError) as raised:
        prep.evaluate("t5", "a.jsonl", fields="[prompt], text")
    assert raised.value.hint == '`overrides="data.source_length=512"`'


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (Key("data.holdout", 0.05), "`data.holdout = 0.05`"),
        (Key("data.source_length"), "`data.source_length`"),
        (Key("data.type"), "`--type`"),
        (Key("data.fields", "[article], summary"), "`--fields '[article], summary'`"),
        (Key("data.add_bos", False), "`--set data.add_bos=false`"),
        (Key("data.source_length", 512, is_override=True), "`--set data.source_length=512`"),
    ],
)
def test_hints_of_eval_replace_recipe_keys_by_options(key: Key, hint: str):
    assert text("{}", key).render(Style("terminal", rename_key=option_of_key)) == hint


def test_model_without_positions_has_the_default_length(capsys: pytest.CaptureFixture[str]):
    Path("a.jsonl").write_text('{"prompt": "w1 w2", "text": "w1 w2 w3"}\n' * 3)
    report = run_json(
        capsys, "eval", "t5", "--data", "a.jsonl", *PAIRS, "--set", "data.source_length=4"
    )
    assert (report["ok"], report.get("seq_length")) == (True, 1024)
