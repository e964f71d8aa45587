"""Maps of users: malformed lines, sizes of atoms, and rows that cover tensors twice or in part."""

from __future__ import annotations

import random

import pytest

from prepcli.core.errors import PrepError
from prepcli.sources.maps import (
    MAX_DROPS,
    MAX_LINES,
    MAX_NBYTES,
    MapCoverage,
    bind_map,
    compute_size,
    parse_map,
)
from prepcli.sources.tensor_match import TensorInfo

SIZES = {"a": 2, "b": 3, "half": 2, "layers": 2}


def problems_of(text: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Return the problems of a valid map for tensors of these shapes."""
    tensor_map = parse_map("own.map", text)
    rows, problems = bind_map(tensor_map, SIZES, {})
    tensors = {name: TensorInfo("float32", shape, 4) for name, shape in shapes.items()}
    coverage = MapCoverage(rows, tensors)
    coverage.check_elements()
    coverage.check_unused(tensor_map.drops)
    return problems + coverage.problems


def test_parse_map_reads_all_kinds_of_lines():
    text = "# a comment\n\nfamily llama # b\nsize x = 4\ndrop y.*\nt: a b <- s: b a  # transposed\n"
    tensor_map = parse_map("own.map", text)
    assert (tensor_map.family, tensor_map.sizes["x"].value) == ("llama", "4")
    assert [(drop.line, drop.value) for drop in tensor_map.drops] == [(5, "y.*")]
    assert [(row.line, row.target.free_atoms) for row in tensor_map.rows] == [(6, ("a", "b"))]


MALFORMED = {
    "t: a <- s: a <- u: a": "it has several `<-`",
    "t: a <- s": "`s` is not of the form `name: dims`",
    "t: a <- s: b": "`a` appears on one side only",
    "t: a a <- s: a": "`a` appears twice on one side",
    "t: (a b <- s: a b": "its parentheses do not match",
    "t: a <- s t: a": "its tensor name is empty, has a space, or braces that do not match",
    "t: a <- s: (a | b)": "exactly one of several parts of a dim must be marked with `>`",
    "t: 3x <- s: 3x": "`3x` is neither an atom (an axis name such as `heads`) nor `atom=index`",
    "family": "`family` is no row, and no `family`, `size` or `drop` line",
    "size a": "`size a` is no row, and no `family`, `size` or `drop` line",
    "size 3 = 3": "`3` is not a valid atom name",
    "__import__('os')": "`__import__('os')` is no row",
    "t: a <- " + "s" * 3000: "it has more than 2,000 characters",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_parse_map_names_the_line_and_its_fault(line: str):
    with pytest.raises(PrepError) as error:
        parse_map("own.map", f"size a = 2\nsize a = 3\n\n{line}")
    assert error.value.what == "the map own.map is not valid"
    assert "line 2: the atom `a` has two sizes, the first one in line 1" in str(error.value.why)
    assert f"line 4: {MALFORMED[line]}" in str(error.value.why)


def test_parse_map_limits_lines_patterns_and_bytes():
    for text in ("\n" * (MAX_LINES + 1), "#" * (MAX_NBYTES + 1)):
        with pytest.raises(PrepError, match="a map has at most"):
            parse_map("own.map", text)
    with pytest.raises(PrepError, match="at most 1,000 `drop` lines"):
        parse_map("own.map", "drop a*\n" * (MAX_DROPS + 1))
    with pytest.raises(PrepError, match="it has no row"):
        parse_map("own.map", "# nothing\n")


def test_parse_map_of_any_text_raises_prep_error_at_most():
    randomness = random.Random(0)
    words = ["t", ":", "<-", "(", ")", "{", "}", "|", ">", "=", "a", "1", "@", " of ", "#", "\n"]
    words += ["family ", "size ", "drop ", " ", "\0", "é"]
    for _ in range(2000):
        text = "".join(randomness.choices(words, k=randomness.randrange(1, 30)))
        try:
            parse_map("own.map", text)
        except PrepError:
            continue


def test_compute_size_reads_numbers_keys_and_products():
    config = {"hidden_size": 64, "text_config": {"heads": 4}, "wrong": "64", "flag": True}
    assert compute_size("12", config) == 12
    assert compute_size("hidden_size / text_config.heads * 3", config) == 48
    assert compute_size("1, 3", config) == (1, 3)
    for value in ("", "wrong", "flag", "0", "hidden_size / 5", "absent", "9" * 30, "1,x", "1 /"):
        with pytest.raises(ValueError, match=r".+"):
            compute_size(value, config)


def test_complete_map_has_no_problems():
    text = """
    drop *.freq
    q: a b <- qk: (>a | a) b
    k: b a <- qk: (a | >a) b
    t.{layers}: a <- s: layers (half=0 a)
    u.{layers}: a <- s: layers (half=1 a)
    """
    assert problems_of(text, {"qk": (4, 3), "s": (2, 4), "x.freq": (7,)}) == []


INCOMPLETE = {
    "t: a b <- s: a b\nu: a b <- s: a b": "lines 1, 2: s is covered twice",
    "t: a b <- s: a b\nt: a b <- u: a b": "lines 1, 2: t is covered twice",
    "t: a b <- s: (>a | a) b": "line 1: s is covered in part: 6 of 12 elements",
    "t: a half=0 b <- s: a b": "line 1: t is covered in part: 6 of 12 elements",
    "t: b a <- s: b a": "line 1: s has shape [2, 3], the row [3, 2]",
    "t: a b <- absent: a b": "line 1: absent does not exist",
    "t.{layers}: a b <- s: a b": "line 1: `layers` appears on one side only",
    "t: a b <- s: a b\ndrop x*": "line 2: `drop x*` matches no tensor without a row",
    "t: layers a b <- s.{layers}: a b": "line 1: s.0, s.1 do not exist",
    "t: a b c <- s: a b c": "line 1: the atom `c` has no size",
    "t: a <- u: a": "s is in no row and no `drop` line",
}


@pytest.mark.parametrize("text", INCOMPLETE)
def test_incomplete_map_has_the_problem_of_its_line(text: str):
    shape = (4, 3) if "(>a" in text else (2, 3)
    try:
        problems = problems_of(text, {"s": shape})
    except PrepError as error:
        problems = [str(error.why)]
    assert INCOMPLETE[text] in "; ".join(problems)
