"""Lists of names in messages."""

from __future__ import annotations

import itertools

from prepcli.console.lists import join_names


def test_join_names_shows_all_of_a_short_list():
    assert join_names(["a", "b"]) == "a, b"
    assert join_names([]) == ""
    assert join_names(map(str, range(20))).endswith("18, 19")


def test_join_names_counts_the_remaining_names():
    assert join_names([str(n) for n in range(2000)]).endswith("19 and 1,980 more")
    assert join_names(["a", "b", "c"], max_names=2, separator="; ") == "a; b and 1 more"


def test_join_names_reads_only_the_names_it_shows():
    assert (
        join_names(map(str, itertools.count()), total=10**9, max_names=2)
        == "0, 1 and 999,999,998 more"
    )
