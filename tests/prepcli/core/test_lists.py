"""Lists of names in messages."""

from __future__ import annotations

import itertools

from prepcli.core.lists import join_names


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


def test_join_names_shows_eight_lines_of_long_names():
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(10, 30)]
    text = join_names(names)
    # A terminal breaks a long line at its edge, and not between words.
    assert -(-len(text) // 80) <= 9
    shown, _, rest = text.partition(" and ")
    assert shown == ", ".join(names[: shown.count(", ") + 1])
    assert rest == f"{19 - shown.count(', ')} more"


def test_join_names_shows_one_name_of_any_length():
    assert join_names(["x" * 1000, "y"]) == f"{'x' * 1000} and 1 more"
