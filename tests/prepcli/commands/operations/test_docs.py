"""`prep docs`: the pages that prep ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.cli.option_groups import CliCommand, complete_page
from prepcli.commands.cli.root import COMMANDS
from prepcli.commands.operations.about import MOVED_PAGES, docs_folder, find_page, page_names
from prepcli.core.errors import OK, USAGE

PAGES = sorted(docs_folder().rglob("*.md"))


def test_docs_lists_all_pages(capsys: pytest.CaptureFixture[str]):
    assert main(["docs", "--json"]) == OK
    pages = json.loads(capsys.readouterr().out)["pages"]
    assert sorted(page["path"] for page in pages) == sorted(map(str, PAGES))
    assert {page["title"] for page in pages if page["name"] == "train"} == {"Train a model"}
    assert main(["docs"]) == OK
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == page_names()


@pytest.mark.parametrize(
    "name", ["train", "how-to/train", "how-to/train.md", "docs/how-to/train.md"]
)
def test_docs_prints_a_page_and_its_path(name: str, capsys: pytest.CaptureFixture[str]):
    path = docs_folder() / "how-to" / "train.md"
    assert main(["docs", name]) == OK
    printed = capsys.readouterr()
    assert printed.out == path.read_text()
    assert printed.err == f"{path}\n"
    assert main(["docs", name, "--path"]) == OK
    assert capsys.readouterr().out == f"{path}\n"


def test_docs_prints_the_folder(capsys: pytest.CaptureFixture[str]):
    assert main(["docs", "--path"]) == OK
    assert Path(capsys.readouterr().out.strip()) == docs_folder()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian", "did you mean `train`?"),
        ("pro", "did you mean `prompts-and-chats` or `prove`?"),
        ("reference/train", "did you mean `train`?"),
        ("zzz", "`prep docs` lists the pages"),
    ],
)
def test_unknown_page_is_an_error(name: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["docs", name]) == USAGE
    error = capsys.readouterr().err
    assert f"unknown page `{name}`" in error
    assert hint in error


def test_names_of_earlier_pages_find_the_new_ones():
    assert not set(MOVED_PAGES) & set(page_names())
    for old, new in MOVED_PAGES.items():
        assert find_page(old) == find_page(new)
    assert find_page("docs/how-to/slurm.md") == docs_folder() / "how-to" / "launch.md"
    assert find_page("reference/launchers") == docs_folder() / "reference" / "engines.md"


def test_names_of_pages_are_unique():
    assert len(page_names()) == len(PAGES)
    assert complete_page("tut") == ["tutorial"]


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if each.guide], ids=lambda each: each.name
)
def test_help_names_the_guide(command: CliCommand, capsys: pytest.CaptureFixture[str]):
    assert main([*f"{command.group} {command.name}".split(), "--help"]) == OK
    assert f"Guide: prep docs {command.guide}\n" in capsys.readouterr().out


def test_guides_are_pages():
    assert [command.name for command in COMMANDS if not command.guide] == ["docs"]
    assert {command.guide for command in COMMANDS if command.guide} <= set(page_names())
