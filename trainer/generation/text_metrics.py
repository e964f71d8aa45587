"""Metrics that compare generated texts with reference texts, computed by the libraries that define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
TextMetric = Callable[[Sequence[str], Sequence[str]], dict[str, float]]


def score_texts(
    names: Sequence[str], texts: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """Compute metrics of texts.

    Args:
        names: Keys of `METRICS`.
        texts: Generated texts.
        references: Reference of each text.

    Returns:
        Values by name: `rouge1`, `rouge2`, `rougeL`, `rougeLsum` (mean F-measure, 0 to 1), `bleu` (0 to 100, of the
        corpus), `exact_match` (fraction). NaN without texts.

    Raises:
        UsageError: A name is unknown.
        PrepError: The package of a metric is not installed.
    """
    check_metrics(names)
    values: dict[str, float] = {}
    for name in names:
        values |= METRICS[name](texts, references)
    return values


def check_metrics(names: Sequence[str]) -> None:
    """Check that metrics can be computed, before texts are generated.

    Raises:
        UsageError: A name is unknown.
        PrepError: The package of a metric is not installed.
    """
    for name in names:
        if name not in METRICS:
            hint = did_you_mean(name, METRICS) or text("{}", Option("metrics", next(iter(METRICS))))
            raise usage_error(f"unknown metric `{name}`", f"known: {', '.join(METRICS)}", hint)
        # A call without texts only imports the package of the metric.
        METRICS[name]((), ())


def _rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F1 of each type of ROUGE."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise _missing_package_error("rouge", "rouge-score") from error
    # The summarization examples of transformers stem words too, so that scores are comparable.
    # rougeLsum takes each line of a text as a sentence.
    scorer: Any = RougeScorer(list(ROUGE_TYPES), use_stemmer=True)
    scores = [
        scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)
    ]
    values: dict[str, float] = {}
    for name in ROUGE_TYPES:
        values[name] = _mean([score[name].fmeasure for score in scores])
    return values


def _bleu(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the BLEU of the corpus, NaN without texts."""
    try:
        import sacrebleu
    except ImportError as error:
        raise _missing_package_error("bleu", "sacrebleu") from error
    if not texts:
        return {"bleu": math.nan}
    # sacrebleu takes one list per set of references. Each of its lists has an entry per text.
    return {"bleu": sacrebleu.corpus_bleu(list(texts), [list(references)]).score}


def _exact_match(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the share of texts equal to their reference, apart from spaces around them."""
    matches = [
        float(text.strip() == reference.strip())
        for text, reference in zip(texts, references, strict=True)
    ]
    return {"exact_match": _mean(matches)}


def _mean(values: Sequence[float]) -> float:
    """Return the mean, NaN without values."""
    if not values:
        return math.nan
    return math.fsum(values) / len(values)


def _missing_package_error(metric: str, package: str) -> PrepError:
    return PrepError(
        f"metric `{metric}` needs {package}",
        "it is not installed",
        "`pip install 'prepcli[metrics]'`",
    )


METRICS: Mapping[str, TextMetric] = {"rouge": _rouge, "bleu": _bleu, "exact_match": _exact_match}
