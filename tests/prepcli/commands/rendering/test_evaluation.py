"""The scores of an evaluation as text and JSON."""

from __future__ import annotations

from prepcli.commands.operations.results import Evaluation, EvaluationScores
from prepcli.commands.rendering.runs import evaluation_report


def scores(loss: float | None, metrics: dict[str, float | None] | None = None) -> EvaluationScores:
    return EvaluationScores(
        loss=loss, perplexity=loss, accuracy=0.5, tokens=1500, sequences=2, metrics=metrics or {}
    )


def evaluation(sources: dict[str, EvaluationScores]) -> Evaluation:
    return Evaluation(
        loss=1.5,
        perplexity=4.25,
        accuracy=0.25,
        tokens=3000,
        sequences=4,
        sources=sources,
        checkpoint="tiny",
        step=None,
        mesh="1,1,8",
        dtype="float32",
        reduction="fast",
        seq_length=16,
        compute_seconds=1.23456,
        seconds=9.0,
        process=1,
    )


def test_evaluation_text_has_a_line_per_source_and_for_all():
    lines = evaluation_report(evaluation({"a": scores(1.0), "b": scores(2.0)})).text
    assert [line.split() for line in lines.splitlines()] == [
        ["source", "loss", "perplexity", "accuracy", "tokens"],
        ["a", "1.000000", "1.0000", "0.5000", "1,500"],
        ["b", "2.000000", "2.0000", "0.5000", "1,500"],
        ["all", "1.500000", "4.2500", "0.2500", "3,000"],
    ]


def test_evaluation_text_names_values_that_are_not_finite():
    text = evaluation_report(evaluation({"a": scores(None, {"bleu": None, "rouge1": 0.5})}))
    assert "not finite" in text.text.splitlines()[1]
    assert text.text.splitlines()[2:] == ["a: bleu none", "a: rouge1 0.5000"]


def test_evaluation_json_keeps_its_keys_and_order():
    report = evaluation_report(evaluation({"a": scores(1.0, {"bleu": 3.0})}))
    names = ["loss", "perplexity", "accuracy", "tokens", "sequences"]
    settings = ["checkpoint", "step", "mesh", "dtype", "reduction", "seq_length"]
    assert [*report.fields] == [*settings, *names, "sources", "seconds"]
    assert report.fields["sources"] == {
        "a": {
            "loss": 1.0,
            "perplexity": 1.0,
            "accuracy": 0.5,
            "tokens": 1500,
            "sequences": 2,
            "bleu": 3.0,
        }
    }
    assert report.fields["seconds"] == 1.235
    assert report.process == 1
