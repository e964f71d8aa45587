"""Hints with the recipe keys for the columns of public datasets."""

from __future__ import annotations

import pytest

from trainer.data.column_hints import columns_hint
from trainer.data.column_values import messages_value
from trainer.data.readers.reader import Record
from trainer.models.errors import PrepError, Text

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
    assert columns_hint(dict.fromkeys(columns, "a"), DEFAULT) == hint


KEYS = "`--set data.format=chat` `--set data.fields=conversations`"


def test_conversations_need_two_keys():
    turns = [{"role": "user", "content": "a"}]
    assert columns_hint({"conversations": turns}, DEFAULT) == KEYS


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_turns_of_sharegpt_are_renamed_first(column: str):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    hint = columns_hint({column: turns}, DEFAULT)
    assert hint.startswith("rename `from` to `role` and `value` to `content` in the data, ")
    assert "then `--set data.format=chat`" in hint
    record = Record({column: turns}, "rows.jsonl:1", 10)
    with pytest.raises(PrepError, match="has no `role`") as caught:
        messages_value(record, column)
    assert caught.value.hint.startswith("rename `from` to `role`")
