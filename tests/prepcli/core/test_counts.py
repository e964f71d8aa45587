"""Counts in messages."""

from __future__ import annotations

import pytest

from prepcli.core.counts import count_text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 devices"), (1, "1 device"), (1024, "1,024 devices")]
)
def test_count_text_has_the_plural_unless_the_number_is_1(number: int, text: str):
    assert count_text(number, "device") == text
