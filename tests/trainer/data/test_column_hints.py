"""Hints with the recipe keys for the columns of public datasets."""

from __future__ import annotations

import pytest

from trainer.data.column_hints import columns_hint
from trainer.models.errors import Text

DEFAULT = Text("name the columns")


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (["prompt", "response"], "`--set data.fields='[prompt], response'`"),
        (["id", "prompt", "completion"], "`--set data.fields='[prompt], completion'`"),
        (["instruction", "input", "output"], "`--set data.fields='[instruction+input], output'`"),
        (["instruction", "output"], "`--set data.fields='[instruction], output'`"),
        (["question", "answer"], "`--set data.fields='[question], answer'`"),
        (["article", "highlights", "id"], "`--set data.fields='[article], highlights'`"),
        (["messages", "prompt", "chosen"], "`--set data.format=chat`"),
        (["content", "path"], "`--set data.fields=content`"),
        (["a", "b"], "name the columns"),
    ],
)
def test_columns_lead_to_the_keys_that_read_them(columns: list[str], hint: str):
    assert columns_hint(columns, DEFAULT) == hint


def test_conversations_need_two_keys():
    hint = columns_hint(["conversations"], DEFAULT)
    assert "`--set data.format=chat`" in hint
    assert "`--set data.fields=conversations`" in hint
