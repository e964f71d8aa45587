"""Lists in messages."""

from __future__ import annotations

import itertools

from prepcli.console.lists import some


def test_some_shows_all_of_a_short_list():
    assert some(["a", "b"]) == "a, b"
    assert some([]) == ""
    assert some(map(str, range(20))).endswith("18, 19")


def test_some_counts_the_rest():
    assert some([str(n) for n in range(2000)]).endswith("19 and 1,980 more")
    assert some(["a", "b", "c"], most=2, separator="; ") == "a; b and 1 more"


def test_some_takes_no_more_names_than_it_shows():
    assert some(map(str, itertools.count()), total=10**9, most=2) == "0, 1 and 999,999,998 more"
