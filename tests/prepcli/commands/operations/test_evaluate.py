"""`prep eval`: losses of all kinds of checkpoints, by source, on any mesh, and against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import error_lines, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer
from trainer.distributed import exact_reduction

LENGTH = 16


@pytest.fixture(autouse=True)
def exact_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow exact results in this process. `test_exact_processes` tests the refusal after another use of JAX."""
    monkeypatch.setattr(exact_reduction, "fuses_multiply_add", lambda: False)


def write_text(path: str, num_words: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, len(WORDS), num_words)
    Path(path).write_text(" ".join(WORDS[number] for number in numbers))


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a Hugging Face model `tiny` with a tokenizer, and two texts, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("tiny"), LLAMA)
    write_tokenizer(Path("tiny"))
    write_text("a.txt", 5 * LENGTH + 3, seed=1)
    write_text("b.txt", 8 * LENGTH, seed=2)
    return tmp_path


def eval_json(capsys: pytest.CaptureFixture[str], checkpoint: str, *words: str) -> dict[str, Any]:
    report = run_json(capsys, "eval", checkpoint, "--seq-length", str(LENGTH), *words)
    assert report["ok"], report
    return report


def test_eval_reports_each_source_and_all(work_dir: Path, capsys: pytest.CaptureFixture[str]):
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


def test_eval_of_all_checkpoint_kinds_is_equal(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    """A Hugging Face folder, and its init for a mesh."""
    run_ok("save-init", "tiny", "--out", "meshed", "--mesh", "1,2,4", "--pad-vocab", "auto")
    expected = eval_json(capsys, "tiny", "--data", "a.txt")["loss"]
    assert eval_json(capsys, "meshed", "--data", "a.txt")["loss"] == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(
    ("mesh", "batch"),
    slow_except(
        [("", 3), ("", 8), ("2,2,2", 1), ("2,2,2", 8), ("1,8,1", 3), ("1,1,8", 1)], [("2,2,2", 8)]
    ),
)
def test_exact_eval_is_equal_on_any_mesh(
    work_dir: Path, capsys: pytest.CaptureFixture[str], mesh: str, batch: int
):
    run_ok("save-init", "tiny", "--out", "padded", "--pad-vocab", "8")
    words = ("padded", "--data", "a.txt", "--reduction", "exact")
    expected = eval_json(capsys, *words, "--batch-size", "1")
    options = ("--mesh", mesh) if mesh else ()
    actual = eval_json(capsys, *words, "--batch-size", str(batch), *options)
    assert [actual[key] for key in ("loss", "accuracy", "tokens")] == [
        expected[key] for key in ("loss", "accuracy", "tokens")
    ]
    fast = eval_json(capsys, "padded", "--data", "a.txt", "--batch-size", str(batch), *options)
    assert fast["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_evaluation_does_not_depend_on_the_number_of_processes(
    work_dir: Path, capsys: pytest.CaptureFixture[str], reduction: str
):
    run_ok("save-init", "tiny", "--out", "padded", "--pad-vocab", "8")
    words = (
        "eval",
        "padded",
        "--data",
        "a.txt",
        "--seq-length",
        str(LENGTH),
        "--mesh",
        "2,2,2",
        "--json",
    )
    (code, out, err), other = finish(
        start_processes(*words, "--reduction", reduction, count=2, devices=4)
    )
    assert code == 0, err
    assert other == (0, "", "")
    expected = eval_json(capsys, "padded", "--data", "a.txt", "--reduction", reduction)["loss"]
    assert json.loads(out)["loss"] == (
        expected if reduction == "exact" else pytest.approx(expected, rel=1e-6)
    )


def test_eval_prints_its_phases(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "tiny", "--data", "a.txt"]) == 0
    assert "\nloading the parameters\ncompiling for the first batch\n" in capsys.readouterr().err


def test_eval_reads_columns_of_json_lines(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    text = Path("a.txt").read_text()
    Path("a.jsonl").write_text(json.dumps({"body": text}) + "\n")
    by_option = eval_json(capsys, "tiny", "--data", "a.jsonl", "--fields", "body")
    assert by_option["loss"] == eval_json(capsys, "tiny", "--data", "a.txt")["loss"]
    assert (
        eval_json(capsys, "tiny", "--data", "a.jsonl", "--set", "data.fields=body")["loss"]
        == by_option["loss"]
    )


def test_eval_keeps_tokens_in_the_cache(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    first = eval_json(capsys, "tiny", "--data", "a.txt", "--cache", "tokens")
    assert any(Path("tokens").iterdir())
    assert (
        eval_json(capsys, "tiny", "--data", "a.txt", "--cache", "tokens")["loss"] == first["loss"]
    )


def test_eval_reports_missing_data(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert error_lines(capsys, "eval", "tiny")[0] == "error: no data was given"
    assert (
        error_lines(capsys, "eval", "tiny", "--data", "=a.txt")[0]
        == "error: `--data =a.txt` is invalid"
    )
    assert (
        error_lines(capsys, "eval", "tiny", "--data", "none.txt")[0]
        == "error: no data in `none.txt`"
    )
    lines = error_lines(capsys, "eval", "tiny", "--data", "a.txt", "--set", "train.steps=3")
    assert lines[0] == "error: `--set train.steps=3` is not supported"
    Path("tiny/tokenizer.json").unlink()
    assert (
        error_lines(capsys, "eval", "tiny", "--data", "a.txt")[0] == "error: tiny has no tokenizer"
    )


def test_evaluate_of_the_api_returns_the_report(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    expected = eval_json(capsys, "tiny", "--data", "first=a.txt")
    result = prep.evaluate("tiny", ["first=a.txt"], seq_length=LENGTH)
    assert (result.loss, result.perplexity, result.accuracy) == (
        expected["loss"],
        expected["perplexity"],
        expected["accuracy"],
    )
    assert result.sources["first"].loss == result.loss
    assert prep.evaluate("tiny", "a.txt", seq_length=LENGTH).loss == result.loss


def test_perplexity_equals_transformers(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    report = eval_json(capsys, "tiny", "--data", "a.txt")
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
    numbers = [int(word[1:]) for word in Path("a.txt").read_text().split()]
    blocks = torch.tensor(numbers[: 5 * LENGTH]).reshape(5, LENGTH)
    with torch.no_grad():
        loss = model(blocks, labels=blocks).loss.double().item()
    assert report["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("stride", [5, LENGTH])
def test_strided_perplexity_equals_transformers(
    work_dir: Path, capsys: pytest.CaptureFixture[str], stride: int
):
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


def test_stride_longer_than_a_window_is_an_error(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
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


def test_metrics_compare_generated_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """The references are the model's own outputs, except for one of four."""
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    monkeypatch.chdir(tmp_path)
    pairs = make_pairs(num_tokens=6)
    pairs[3]["target"] = "w1 w1 w1 w1 w1 w1"
    write_pairs(pairs)
    words = ("--fields", "[source], target", "--set", "data.source_length=8", "--seq-length", "6")
    metrics = ("--metric", "exact_match", "--metric", "rouge", "--metric", "bleu")
    report = run_json(
        capsys, "eval", "t5", "--data", "pairs.jsonl", *words, *metrics, "--batch-size", "3"
    )
    assert report["ok"], report
    assert not report["warnings"]
    scores = report["sources"]["pairs.jsonl"]
    assert scores["exact_match"] == 0.75
    assert 0.75 <= scores["rouge1"] < 1
    assert 0 < scores["bleu"] < 100
    result = prep.evaluate(
        "t5",
        "pairs.jsonl",
        fields="[source], target",
        seq_length=6,
        metrics="exact_match",
        overrides="data.source_length=8",
    )
    assert result.sources["pairs.jsonl"].metrics == {"exact_match": 0.75}


def test_metrics_compare_with_whole_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Two of three references are longer than the generated texts, which equal their first tokens."""
    monkeypatch.chdir(tmp_path)
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


def test_metrics_of_a_model_without_encoder_are_refused(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    lines = error_lines(capsys, "eval", "tiny", "--data", "a.txt", "--metric", "rouge")
    assert lines[0] == "error: `--metric rouge` is not supported for this model"
