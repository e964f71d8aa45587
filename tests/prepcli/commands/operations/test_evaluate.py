"""`prep eval`: losses of all kinds of checkpoints, settings, and hints that name its options."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.compute_options import (
    EFFECTIVE_KEYS,
    KEYS_TEXT,
    EvaluateOptions,
)
from prepcli.commands.operations.evaluate import data_sources, evaluation_recipe
from prepcli.core.errors import USAGE, UsageError
from prepcli.core.option_spec import option_specs
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer
from trainer.distributed import exact_reduction
from trainer.recipe import Recipe
from trainer.recipe.tables import KEY_SCHEMAS

LENGTH = 16


@pytest.fixture(autouse=True)
def exact_process(monkeypatch: MonkeyPatch) -> None:
    """Allow exact results in this process. `test_exact_processes` tests the refusal after another use of JAX."""
    monkeypatch.setattr(exact_reduction, "fuses_multiply_add", lambda: False)


def write_text(path: str, num_words: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, len(WORDS), num_words)
    Path(path).write_text(" ".join(WORDS[number] for number in numbers))


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Make a Hugging Face model `tiny` with a tokenizer, and two texts, in the current folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("tiny"), LLAMA)
    write_tokenizer(Path("tiny"))
    write_text("a.txt", 5 * LENGTH + 3, seed=1)
    write_text("b.txt", 8 * LENGTH, seed=2)
    return tmp_path


def eval_json(capsys: Capture, checkpoint: str, *words: str) -> dict[str, Any]:
    report = run_json(capsys, "eval", checkpoint, "--seq-length", str(LENGTH), *words)
    assert report["ok"], report
    return report


def test_eval_reports_each_source_and_all(work_dir: Path, capsys: Capture):
    both = eval_json(capsys, "tiny", "--data", "first=a.txt", "--data", "b.txt")
    assert set(both["sources"]) == {"first", "b.txt"}
    first, second = both["sources"].values()
    assert (first["sequences"], second["sequences"], both["sequences"]) == (5, 8, 13)
    assert both["tokens"] == first["tokens"] + second["tokens"] == 13 * (LENGTH - 1)
    weighted = sum(part["loss"] * part["tokens"] for part in (first, second)) / both["tokens"]
    assert both["loss"] == pytest.approx(weighted, rel=1e-12)
    assert both["perplexity"] == pytest.approx(math.exp(weighted))
    assert 0 <= both["accuracy"] < 0.2
    assert eval_json(capsys, "tiny", "--data", "b.txt")["loss"] == second["loss"]
    assert eval_json(capsys, "tiny", "--data", "b.txt", "--limit", "2")["sequences"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_evaluation_does_not_depend_on_the_number_of_processes(
    work_dir: Path, capsys: Capture, reduction: str
):
    run_ok("save-init", "tiny", "--out", "padded", "--pad-vocab", "8")
    words = ("eval", "padded", "--data", "a.txt", "--seq-length", str(LENGTH), "--json")
    words = (*words, "--mesh", "2,2,2")
    (code, out, err), other = finish(
        start_processes(*words, "--reduction", reduction, count=2, devices=4)
    )
    assert code == 0, err
    assert other == (0, "", "")
    expected = eval_json(capsys, "padded", "--data", "a.txt", "--reduction", reduction)["loss"]
    assert json.loads(out)["loss"] == (
        expected if reduction == "exact" else pytest.approx(expected, rel=1e-6)
    )


def test_eval_prints_its_phases(work_dir: Path, capsys: Capture):
    assert main(["eval", "tiny", "--data", "a.txt"]) == 0
    assert "\nloading the parameters\ncompiling for the first batch\n" in capsys.readouterr().err


def test_eval_reads_columns_of_json_lines(work_dir: Path, capsys: Capture):
    text = Path("a.txt").read_text()
    Path("a.jsonl").write_text(json.dumps({"body": text}) + "\n")
    expected = eval_json(capsys, "tiny", "--data", "a.txt")["loss"]
    for options in (("--fields", "body"), ("--set", "data.fields=body")):
        assert eval_json(capsys, "tiny", "--data", "a.jsonl", *options)["loss"] == expected


def test_eval_keeps_tokens_in_the_cache(work_dir: Path, capsys: Capture):
    words = ("tiny", "--data", "a.txt", "--cache", "tokens")
    first = eval_json(capsys, *words)
    assert any(Path("tokens").iterdir())
    assert eval_json(capsys, *words)["loss"] == first["loss"]


# Words after `prep eval tiny`, and the error
REFUSED = [
    ("", "no data was given"),
    ("--data =a.txt", "`--data =a.txt` is invalid"),
    ("--data none.txt", "no data in `none.txt`"),
    ("--data a.txt --set train.steps=3", "`--set train.steps=3` is not supported"),
    ("--data a.txt --metric rouge", "`--metric rouge` is not supported for this model"),
    ("--data a.txt --tokenizer gone.json", "no tokenizer at gone.json"),
]


def test_eval_reports_missing_data(work_dir: Path, capsys: Capture):
    for words, message in REFUSED:
        lines = error_lines(capsys, "eval", "tiny", *words.split())
        assert lines[0] == f"error: {message}"
    Path("tiny/tokenizer.json").unlink()
    lines = error_lines(capsys, "eval", "tiny", "--data", "a.txt")
    assert lines[0] == "error: tiny has no tokenizer"


def test_evaluate_of_the_api_returns_the_report(work_dir: Path, capsys: Capture):
    expected = eval_json(capsys, "tiny", "--data", "first=a.txt")
    result = prep.evaluate("tiny", ["first=a.txt"], seq_length=LENGTH)
    for key in ("loss", "perplexity", "accuracy"):
        assert getattr(result, key) == expected[key]
    assert result.sources["first"].loss == result.loss
    assert prep.evaluate("tiny", "a.txt", seq_length=LENGTH).loss == result.loss


@pytest.mark.parametrize("stride", slow_except([5, LENGTH], [LENGTH]))
def test_strided_perplexity_equals_transformers(work_dir: Path, capsys: Capture, stride: int):
    """The loop of the page "Perplexity of fixed-length models", with the exact number of targets per window."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    overrides = ("--set", f"eval.stride={stride}", "--set", "data.add_eos=false")
    report = eval_json(capsys, "tiny", "--data", "a.txt", *overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
    ids = torch.tensor([[int(word[1:]) for word in Path("a.txt").read_text().split()]])
    count = ids.shape[1]
    nll_sum, num_targets, previous_end = 0.0, 0, 0
    for begin in range(0, count, stride):
        end = min(begin + LENGTH, count)
        targets = ids[:, begin:end].clone()
        targets[:, : previous_end - begin] = -100
        window_targets = int((targets[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=targets).loss.double().item()
        nll_sum += loss * window_targets
        num_targets += window_targets
        previous_end = end
        if end == count:
            break
    assert report["tokens"] == num_targets
    assert report["loss"] == pytest.approx(nll_sum / num_targets, abs=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(nll_sum / num_targets), rel=1e-5)


def test_stride_longer_than_a_window_is_an_error(work_dir: Path, capsys: Capture):
    words = ("eval", "tiny", "--data", "a.txt", "--seq-length", str(LENGTH), "--set")
    lines = error_lines(capsys, *words, "eval.stride=17")
    assert "tokens between them would be left out" in "\n".join(lines)
    whole = error_lines(capsys, *words, "eval.stride=4", "--set", "data.packing=documents")
    assert "windows need concatenated texts" in "\n".join(whole)


def make_pairs(num_tokens: int, num_pairs: int = 4) -> list[dict[str, str]]:
    """Write a T5 model, and return pairs whose targets are what the model generates for their sources."""
    # Without an end token, a text ends only at its limit.
    make_checkpoint(Path("t5"), FAMILY_CONFIGS["t5"] | {"eos_token_id": None})
    write_tokenizer(Path("t5"))
    sources = [f"w{10 + number} w{20 + number} w{30 + number}" for number in range(num_pairs)]
    targets = prep.generate("t5", sources, max_new_tokens=num_tokens).texts
    return [{"source": source, "target": str(target)} for source, target in zip(sources, targets)]


def write_pairs(pairs: list[dict[str, str]]) -> None:
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def test_metrics_compare_with_whole_references(capsys: Any):
    """Two of three references are longer than the generated texts, which equal their first tokens."""
    pairs = make_pairs(num_tokens=6, num_pairs=3)
    pairs[0]["target"] = " ".join(pairs[0]["target"].split()[:4])
    write_pairs(pairs)
    words = ("--fields", "[source], target", "--set", "data.source_length=8", "--seq-length", "4")
    report = run_json(
        capsys, "eval", "t5", "--data", "pairs.jsonl", *words, "--metric", "exact_match"
    )
    assert report["sources"]["pairs.jsonl"]["exact_match"] == pytest.approx(1 / 3)
    expected = (
        "2 of 3 references are longer than 4 tokens, where generated texts end (`--seq-length`)"
    )
    assert report["warnings"] == [expected]
    options: dict[str, Any] = {"fields": "[source], target", "seq_length": 4}
    overrides = "data.source_length=8"
    options |= {"metrics": "exact_match", "overrides": overrides}
    result = prep.evaluate("t5", "pairs.jsonl", **options)
    assert result.sources["pairs.jsonl"].metrics == {"exact_match": pytest.approx(1 / 3)}


# Hints of `prep eval` name its options, not tables of a recipe


PAIRS = ("--fields", "[prompt], text")
SPANS = ("--set", "data.objective=span_corruption")


@pytest.fixture
def two_models(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, config in (("llama", LLAMA), ("t5", FAMILY_CONFIGS["t5"])):
        make_checkpoint(Path(name), config)
        write_tokenizer(Path(name))
    Path("a.jsonl").write_text('{"prompt": "w1 w2", "text": "w1 w2 w3"}\n' * 50)
    Path("a.txt").write_text("w1 w2 w3 " * 50)


# Words of `prep eval`, and the hint of its error
EVAL_HINTS = [
    ("t5 --data a.jsonl --fields '[prompt], text'", "`--set data.source_length=512`"),
    ("t5 --data a.jsonl --set data.objective=span_corruption", "`--set data.source_length=512`"),
    (
        "t5 --data a.jsonl",
        "`--type json` and `--fields '[article], summary'`, or `--set data.objective=span_corruption`",
    ),
    ("llama --data a.jsonl --set data.source_length=4", "remove it"),
    (
        "llama --data a.jsonl --set data.noise_density=0.3",
        "`--set data.objective=span_corruption`",
    ),
    ("llama --data a.jsonl --fields body", "`--fields text`"),
    ("llama --data a.txt --fields body", "`--type` sets the type of the files"),
    ("llama --data a.txt --type text --fields body", "`--type json`"),
    ("llama --data a.txt --type foo", "`--type text`"),
    ("llama --data a.txt --set data.nope=1", "did you mean `--type`?"),
    ("llama --data a.jsonl --tokenizer none", "`--tokenizer PATH`"),
    ("llama --data a.jsonl --seq-length 4000", "add more text, or `--seq-length 200`"),
    (
        "llama --data a.jsonl --set model.attention_kernel=cudnn",
        "`--set model.attention_kernel=auto`",
    ),
]


@pytest.mark.usefixtures("two_models")
@pytest.mark.parametrize(("words", "hint"), EVAL_HINTS)
def test_hints_of_eval_name_its_options(words: str, hint: str, capsys: Capture):
    assert error_lines(capsys, "eval", *shlex.split(words))[2] == f" hint: {hint}"


@pytest.mark.usefixtures("two_models")
def test_each_of_several_errors_names_options(capsys: Capture):
    words = (*SPANS, "--set", "data.always_start_with_bos=true")
    assert main(["eval", "t5", "--data", "a.jsonl", *words]) == USAGE
    error = capsys.readouterr().err
    assert "prep eval has 2 errors" in error
    assert "`--set data.source_length=512`" in error
    assert "in [data]" not in error


@pytest.mark.usefixtures("two_models")
def test_hints_of_evaluate_name_its_arguments():
    with pytest.raises(prep.PrepError) as raised:
        prep.evaluate("llama", "a.jsonl", fields="body")
    assert raised.value.hint == '`fields="text"`'
    with pytest.raises(prep.PrepError) as raised:
        prep.evaluate("t5", "a.jsonl", fields="[prompt], text")
    assert raised.value.hint == '`overrides="data.source_length=512"`'


@pytest.mark.slow
@pytest.mark.usefixtures("two_models")
def test_model_without_positions_has_the_default_length(capsys: Capture):
    Path("a.jsonl").write_text('{"prompt": "w1 w2", "text": "w1 w2 w3"}\n' * 3)
    report = run_json(
        capsys, "eval", "t5", "--data", "a.jsonl", *PAIRS, "--set", "data.source_length=4"
    )
    assert (report["ok"], report.get("seq_length")) == (True, 1024)


# Settings of an evaluation: sources by name, and the recipe keys that have an effect


def make_recipe(override: str) -> Recipe:
    options: EvaluateOptions = {"overrides": override}
    return evaluation_recipe(
        options, ["a.txt"], checkpoint="tiny", dtype="float32", max_positions=64
    )


IGNORED_KEYS = ["rope_theta", "overrides", "rope_scaling.factor"]


def test_keys_without_effect_are_not_supported():
    for key in (*(f"model.{name}" for name in IGNORED_KEYS), "data.holdout", "data.path"):
        with pytest.raises(UsageError) as raised:
            make_recipe(f"{key}=1")
        assert raised.value.what == f"`--set {key}=1` is not supported"
    with pytest.raises(UsageError) as raised:
        make_recipe("data.source_lenght=1")
    assert "`data.source_length`" in raised.value.hint


def test_effective_keys_exist_and_change_the_recipe():
    assert not EFFECTIVE_KEYS - {*KEY_SCHEMAS}
    assert make_recipe("model.attention_kernel=reference").model.attention_kernel == "reference"


def test_help_and_reference_name_all_effective_keys(capsys: Capture):
    assert main(["eval", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert all(key.partition(".")[2] in KEYS_TEXT for key in EFFECTIVE_KEYS)
    assert KEYS_TEXT in help_text
    assert KEYS_TEXT in option_specs(EvaluateOptions)["overrides"].help


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("wiki=a.txt", "wiki", "a.txt"),
        ("wiki=data/*.txt", "wiki", "data/*.txt"),
        ("wiki=s3://bucket/lang=en", "wiki", "s3://bucket/lang=en"),
        ("s3://bucket/lang=en/a.txt", "s3://bucket/lang=en/a.txt", "s3://bucket/lang=en/a.txt"),
        ("data/lang=en/new.txt", "data/lang=en/new.txt", "data/lang=en/new.txt"),
        ("lang=en", "lang=en", "lang=en"),  # exists
        ("lang=*", "lang=*", "lang=*"),  # a glob that matches
    ],
)
def test_sources_split_names_from_paths(text: str, name: str, path: str):
    Path("lang=en").mkdir()
    assert data_sources([text]) == {name: [path]}


@pytest.mark.parametrize("text", ["", "=a.txt", "wiki="])
def test_sources_reject_empty_names_and_paths(text: str):
    with pytest.raises(UsageError):
        data_sources([text])
