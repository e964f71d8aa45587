"""Records of added tokens: sizes and ids agree, and other records are one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import DamagedError
from prepcli.formats.added_tokens import encode_record, parse_record

ADDITION: dict[str, Any] = {
    "tokens": [{"id": 7, "content": "<a>"}, {"id": 8, "content": "<b>"}],
    "init": "mean",
    "true_vocab_size": 7,
    "padded_vocab_size": 8,
    "files": {"tokenizer.json": {"inserted": [[3, 9]], "before": "0" * 32, "after": "1" * 32}},
}


def record(**changes: Any) -> bytes:
    return json.dumps({"format": 1, "additions": [ADDITION | changes]}).encode()


def test_encoded_record_is_parsed_again():
    additions = parse_record(Path("r"), record())
    assert parse_record(Path("r"), encode_record(additions)) == additions
    assert additions[0].new_vocab_size == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padded_vocab_size": 6}, "7 tokens do not fit 6 rows"),
        ({"padded_vocab_size": 1 << 31}, "do not fit"),
        ({"true_vocab_size": 6}, "the token '<a>' has id 7, not 6"),
        ({"tokens": [{"id": 7, "content": "a"}, {"id": 7, "content": "b"}]}, "id 7, not 8"),
        ({"tokens": []}, "additions.0.tokens"),
        ({"more": 1}, "additions.0.more"),
    ],
)
def test_inconsistent_records_are_damaged(changes: dict[str, Any], message: str):
    with pytest.raises(DamagedError) as caught:
        parse_record(Path("r"), record(**changes))
    assert message in str(caught.value)
