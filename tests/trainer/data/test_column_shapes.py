"""Hints with the recipe keys for the columns of public datasets."""

from __future__ import annotations

import pytest

from prepcli.core.errors import PrepError, Text
from trainer.data.columns import columns_hint
from trainer.data.conversations import messages_value
from trainer.data.readers.reader import Record

DEFAULT = Text("name the columns")


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (
            ["prompt", "response"],
            "`--set data.format=prompt_response` `--set data.fields='[prompt], response'`",
        ),
        (
            ["id", "prompt", "completion"],
            "`--set data.format=prompt_completion` `--set data.fields='[prompt], completion'`",
        ),
        (
            ["instruction", "input", "output"],
            "`--set data.format=alpaca` `--set data.fields='[instruction+input], output'`, "
            "or `--set data.fields='[instruction+input], output'`",
        ),
        (
            ["instruction", "output"],
            "`--set data.format=alpaca` `--set data.fields='[instruction+input], output'`, "
            "or `--set data.fields='[instruction], output'`",
        ),
        (
            ["instruction", "context", "response"],
            "`--set data.format=alpaca` `--set data.fields='[instruction+context], response'`, "
            "or `--set data.fields='[instruction+context], response'`",
        ),
        (["question", "context", "response"], "`--set data.fields='[question+context], response'`"),
        (["article", "highlights", "id"], "`--set data.fields='[article], highlights'`"),
        (["content", "path"], "`--set data.fields=content`"),
        (["a", "b"], "name the columns"),
    ],
)
def test_columns_lead_to_the_keys_that_read_them(columns: list[str], hint: str):
    assert columns_hint(dict.fromkeys(columns, "a"), DEFAULT) == hint


def test_other_columns_of_conversations_need_two_keys():
    turns = [{"role": "user", "content": "a"}]
    keys = "`--set data.format=chat` `--set data.fields=conversations`"
    assert columns_hint({"conversations": turns}, DEFAULT) == keys


def test_turns_of_sharegpt_are_a_format():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    with pytest.raises(PrepError, match="has no `role`") as caught:
        messages_value(Record({"conversations": turns}, "rows.jsonl:1", 10), "conversations")
    assert caught.value.hint == "`--set data.format=sharegpt` `--set data.fields=conversations`"
