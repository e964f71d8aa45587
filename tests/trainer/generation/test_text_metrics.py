"""Metrics of generated texts, against the values of their definitions."""

from __future__ import annotations

import math
import sys

import pytest

from prepcli.core.errors import PrepError, UsageError
from trainer.generation.text_metrics import METRICS, check_metrics, score_texts

TEXTS = ["the cat sat on the mat", "a dog"]
REFERENCES = ["the cat sat on the mat", "the dog ran"]


def test_exact_match_ignores_outer_spaces():
    assert score_texts(["exact_match"], [" a b", "a"], ["a b ", "b"]) == {"exact_match": 0.5}


def test_rouge_is_the_mean_f_measure():
    pytest.importorskip("rouge_score")
    scores = score_texts(["rouge"], TEXTS, REFERENCES)
    one_of_two = 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)
    assert scores["rouge1"] == pytest.approx((1 + one_of_two) / 2)
    assert scores["rouge2"] == pytest.approx(0.5)


def test_bleu_equals_sacrebleu_corpus_bleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    assert (
        score_texts(["bleu"], TEXTS, REFERENCES)["bleu"]
        == sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score
    )
    assert score_texts(["bleu"], REFERENCES[:1], REFERENCES[:1])["bleu"] == pytest.approx(100)


def test_metrics_of_no_texts_are_nan():
    assert math.isnan(score_texts(["exact_match"], [], [])["exact_match"])


@pytest.mark.parametrize(
    ("metric", "module"), [("rouge", "rouge_score.rouge_scorer"), ("bleu", "sacrebleu")]
)
def test_missing_package_names_the_extra(metric: str, module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PrepError) as raised:
        check_metrics([metric])
    assert raised.value.hint == "`pip install 'prepcli[metrics]'`"


def test_unknown_metric_is_an_error():
    with pytest.raises(UsageError, match="unknown metric `meteor`"):
        score_texts(["meteor"], TEXTS, REFERENCES)
    assert set(METRICS) == {"rouge", "bleu", "exact_match"}
