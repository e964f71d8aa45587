"""Results of commands as text and JSON: evaluations, generated texts, training runs and comparisons."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.console.ui import Ui
from prepcli.commands.operations.run_results import (
    Evaluation,
    EvaluationScores,
    Generation,
    TrainingRun,
)
from prepcli.commands.operations.verification_results import Verification
from prepcli.commands.rendering.checkpoints import verification_report
from prepcli.commands.rendering.runs import evaluation_report, generation_report, training_report
from prepcli.core.errors import STOPPED, PrepError
from prepcli.core.observer import NORMAL


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


def generation(texts: tuple[str | None, ...]) -> Generation:
    return Generation(
        texts=texts,
        tokens=((1, 2), (3,)),
        ended=(False, True),
        tokens_per_s=12.3,
        prompts=("a", "b"),
        prompt_tokens=((5,), (6, 7)),
        mesh=None,
        dtype="float32",
        compile_seconds=0.98765,
        seconds=2.0,
    )


@pytest.mark.parametrize(
    ("texts", "lines"), [((" one", " two"), [" one", " two"]), ((None, None), ["1,2", "3"])]
)
def test_generation_text_is_a_line_per_prompt(texts: tuple[str | None, ...], lines: list[str]):
    assert generation_report(generation(texts)).text.splitlines() == lines


def test_generation_json_has_no_texts_without_a_tokenizer():
    fields = generation_report(generation((None, None))).fields
    assert [*fields] == [
        "mesh",
        "dtype",
        "prompts",
        "prompt_tokens",
        "texts",
        "tokens",
        "ended",
        "tokens_per_s",
        "compile_seconds",
    ]
    assert fields["texts"] is None
    assert fields["compile_seconds"] == 0.988


def run(
    error: PrepError | None = None, *, is_finished: bool = False, **details: Any
) -> TrainingRun:
    fields = {"output": "runs/a/5", "run": "runs/a", "step": 5, "steps": 10, **details}
    return TrainingRun(Path("runs/a"), 5, is_finished, 1.0, fields, error)


def test_finished_run_names_its_last_step_and_the_next_command():
    report = training_report(run(is_finished=True))
    assert (report.text, report.next_command) == ("runs/a/5", "prep export runs/a")


def test_stopped_run_has_fields_and_an_error():
    report = training_report(run(PrepError("stopped", code=STOPPED)))
    assert report.error is not None
    assert (report.text, report.next_command, report.error.code) == ("", "", STOPPED)
    assert report.fields["step"] == 5


def test_dry_run_report_names_last_step_and_folder():
    report = training_report(run(dry_run=True, memory={}))
    assert (report.text, report.next_command) == ("would train to step 10 in runs/a", "")


def test_dry_run_report_of_a_finished_run_promises_no_steps():
    report = training_report(run(dry_run=True, memory={}, is_finished=True))
    assert report.text == "would train no step: runs/a is finished"


EQUAL = Verification(
    is_equal=True, tensors=3, values=1200, differences=(), seconds=0.5, checkpoint="m"
)
DIFFERENT = Verification(
    is_equal=False,
    tensors=None,
    values=None,
    differences=[{"leaf": "", "tensor": f"t{i}", "what": "is not in b"} for i in range(30)],
    seconds=0.5,
    checkpoint="a",
    against="b",
    total_tensors=40,
)


def silent_ui(level: int = NORMAL) -> Ui:
    return Ui("verify", level=level, out=io.StringIO(), err=io.StringIO())


def test_equal_checkpoints_report_values():
    report = verification_report(EQUAL, silent_ui())
    assert report.text == "ok: 3 tensors, 1,200 values, 0 different (0.5 s)"
    assert [*report.fields] == ["tensors", "values", "differences", "ignored_padding_rows"]


def test_quick_check_of_one_checkpoint_has_no_padding():
    quick = replace(EQUAL, values=None, checked=("headers", "file sizes"))
    report = verification_report(quick, silent_ui())
    assert report.text.startswith("ok: headers and file sizes of 3 tensors, no values read")
    assert [*report.fields] == ["tensors", "values", "checked"]


def test_differences_of_both_checkpoints_have_no_total():
    """Tensors that only `against` has are not part of the checkpoint's total."""
    report = verification_report(replace(DIFFERENT, total_tensors=20), silent_ui())
    assert report.error is not None
    assert report.error.what == "a is not the same as b (30 tensors)"


def test_differences_are_an_error_with_counts():
    report = verification_report(DIFFERENT, silent_ui())
    assert report.error is not None
    assert report.error.what == "a is not the same as b (30 of 40 tensors)"
    assert report.error.why == "t0 is not in b"
    assert [*report.fields] == ["differences", "ignored_padding_rows", "settings", "left_out"]
