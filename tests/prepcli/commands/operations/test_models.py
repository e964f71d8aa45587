"""`prep models`: the table of aliases."""

from __future__ import annotations

import pytest

from prepcli.commands.operations.about import list_aliases
from prepcli.commands.rendering.checkpoints import aliases_report
from prepcli.core.errors import USAGE, PrepError
from prepcli.models.registry import FAMILIES
from prepcli.sources.aliases import ALIASES


def test_models_lists_all_aliases() -> None:
    report = aliases_report(list_aliases())
    table, families = report.text.split("\n\n")
    assert all(name in families for name in FAMILIES)
    assert report.fields["families"] == [*FAMILIES]
    lines = table.splitlines()
    assert lines[0].split() == [
        "alias", "hub", "id", "family", "parameters", "size", "vocabulary", "shards", "on", "8", "shards", "on", "128",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == [alias.name for alias in ALIASES]
    (line,) = (line for line in lines if line.startswith("gpt-neo-1.3B "))
    assert line.split() == [
        "gpt-neo-1.3B", "EleutherAI/gpt-neo-1.3B", "gpt_neo", "1,315,575,808", "4.90", "GiB", "50,257", "1", "1",
    ]  # fmt: skip


def test_models_fields_are_numbers() -> None:
    fields = aliases_report(list_aliases("gpt_neo")).fields["models"]
    assert isinstance(fields, list)
    assert fields[1] == {
        "alias": "gpt-neo-1.3B",
        "hub_id": "EleutherAI/gpt-neo-1.3B",
        "family": "gpt_neo",
        "parameters": 1315575808,
        "bytes": 5262303232,
        "vocab": 50257,
        "gcd": {"8": 1, "128": 1},
    }


def test_models_selects_a_family() -> None:
    lines = aliases_report(list_aliases("llama")).text.split("\n\n")[0].splitlines()[1:]
    assert lines
    assert all(line.split()[2] == "llama" for line in lines)


def test_unknown_family_gets_a_suggestion() -> None:
    with pytest.raises(PrepError) as caught:
        aliases_report(list_aliases("gptneo"))
    assert (caught.value.hint, caught.value.code) == ("did you mean `gpt_neo`?", USAGE)
