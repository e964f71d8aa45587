"""Tests of the table of aliases. Tests of bench check its sizes against published configs."""

from __future__ import annotations

from prepcli.models.registry import FAMILIES as SUPPORTED_FAMILIES
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, ALIASES_BY_NAME


def test_alias_nbytes_match_published_models() -> None:
    assert ALIASES_BY_NAME["gpt-neo-1.3B"].nbytes == 5_262_303_232
    assert ALIASES_BY_NAME["llama-13b"].nbytes == 26_031_728_640


def test_alias_names_are_unique_and_no_paths() -> None:
    assert len(ALIASES_BY_NAME) == len(ALIASES)
    assert not any(set("/@~ ") & set(alias.name) for alias in ALIASES)
    assert all(alias.hub_id.count("/") == 1 for alias in ALIASES)


def test_alias_families_are_supported() -> None:
    assert {*ALIAS_FAMILIES} <= {*SUPPORTED_FAMILIES}
