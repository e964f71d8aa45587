"""Generated texts as text and JSON."""

from __future__ import annotations

import pytest

from prepcli.commands.operations.results import Generation
from prepcli.commands.rendering.runs import generation_report


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
