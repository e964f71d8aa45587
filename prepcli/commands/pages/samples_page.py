"""Samples of training data as a self-contained HTML page: the text that a model sees, with marks around loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from prepcli.commands.pages.html_page import html_table, write_html_page
from prepcli.core.tables import Table
from trainer.data.sample_text import (
    COUNT_HEADER,
    SampleCounts,
    SamplePart,
    TokenSample,
    count_cells,
    part_ids,
    part_text,
    sample_texts,
    sample_title,
    weight_groups,
)

STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px }
pre { border-left: 3px solid #8884; padding-left: .6rem }
mark { background: #2da44e55; color: inherit; border-radius: 2px }
mark.partial { background: #d4a72c66 }
.special { opacity: .65 }
"""


def write_samples_page(
    path: Path,
    name: str,
    counts: Mapping[str, SampleCounts],
    samples: Mapping[str, Sequence[TokenSample]],
) -> None:
    """Write the page of the samples of a recipe, with the counts and the samples of each data set by name.

    Raises:
        PrepError: The file cannot be written, or the path is something other than a page of prep.
    """
    write_html_page(path, f"prep tokenize {name}", _page_body(name, counts, samples), style=STYLE)


def _page_body(
    name: str, counts: Mapping[str, SampleCounts], samples: Mapping[str, Sequence[TokenSample]]
) -> Iterator[str]:
    yield f"<h1>Samples of {escape(name)}</h1>"
    # A column per data set: the usual one or two fit on a phone.
    first, *names = COUNT_HEADER
    columns = [count_cells(part, part_counts)[1:] for part, part_counts in counts.items()]
    rows = [[label, *cells] for label, cells in zip(names, zip(*columns), strict=True)]
    yield from html_table(Table([first, *counts], rows))
    example = _marked_element("so", 0.5)
    yield f"<p>Tokens with loss are <mark>marked</mark>, with their weight if it is not 1: {example}.</p>"
    for part, part_samples in samples.items():
        for number, sample in enumerate(part_samples, 1):
            yield f"<h2>{escape(sample_title(part, number, sample))}</h2>"
            yield from _sample_elements(sample)


def _sample_elements(sample: TokenSample) -> Iterator[str]:
    """Yield the texts of a sample, and their token ids to unfold."""
    for label, parts in sample_texts(sample):
        if label:
            yield f"<h3>{label}</h3>"
        texts: list[str] = []
        ids: list[str] = []
        for weight, group in weight_groups(parts):
            texts.append(_marked_element("".join(map(_part_element, group)), weight))
            ids.append(_marked_element(" ".join(map(part_ids, group)), weight))
        # HTML ignores a newline after <pre>, so that a text may begin with one.
        yield f"<pre>\n{''.join(texts)}</pre>"
        yield f"<details><summary>token ids</summary><p>{' '.join(ids)}</p></details>"


def _part_element(part: SamplePart) -> str:
    text = escape(part_text(part))
    if part.is_special:
        return f'<span class="special">{text}</span>'
    return text


def _marked_element(text: str, weight: float) -> str:
    if not weight:
        return text
    if weight == 1:
        return f"<mark>{text}</mark>"
    return f'<mark class="partial">{weight:g}:{text}</mark>'
