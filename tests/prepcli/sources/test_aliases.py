"""The table of aliases; tests of bench hold its sizes against the shapes that published configurations have."""

from __future__ import annotations

from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, ALIASES_BY_NAME
from trainer.models.registry import FAMILIES as KNOWN


def test_known_totals() -> None:
    assert ALIASES_BY_NAME["gpt-neo-1.3B"].nbytes == 5_262_303_232
    assert ALIASES_BY_NAME["llama-13b"].nbytes == 26_031_728_640


def test_names_are_unique_and_cannot_be_taken_for_hub_ids_or_paths() -> None:
    assert len(ALIASES_BY_NAME) == len(ALIASES)
    assert not any(set("/@~ ") & set(alias.name) for alias in ALIASES)
    assert all(alias.hub_id.count("/") == 1 for alias in ALIASES)


def test_families_that_work_have_aliases() -> None:
    assert {*ALIAS_FAMILIES} == {*KNOWN}
