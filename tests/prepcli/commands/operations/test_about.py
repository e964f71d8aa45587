"""`prep docs`, `prep env`, `prep models` and `prep recipes`."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.cli.option_groups import complete_page
from prepcli.commands.cli.root import all_commands
from prepcli.commands.console.ui import Report
from prepcli.commands.operations.about import (
    MOVED_PAGES,
    docs_folder,
    find_page,
    list_aliases,
    page_names,
    read_environment,
)
from prepcli.commands.operations.recipes import find_recipe, find_training_recipe, recipes_folder
from prepcli.commands.rendering.checkpoints import aliases_report
from prepcli.commands.rendering.runs import environment_report
from prepcli.core.errors import FAILED, OK, USAGE, PrepError, UsageError
from prepcli.models.registry import FAMILIES
from prepcli.sources.aliases import ALIASES
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.run_cli import Capture, MonkeyPatch

PAGES = sorted(docs_folder().rglob("*.md"))


def test_docs_lists_all_pages(capsys: Capture):
    assert main(["docs", "--json"]) == OK
    pages = json.loads(capsys.readouterr().out)["pages"]
    assert sorted(page["path"] for page in pages) == sorted(map(str, PAGES))
    assert {page["title"] for page in pages if page["name"] == "train"} == {"Train a model"}
    assert main(["docs"]) == OK
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == page_names()
    assert len(page_names()) == len(PAGES)
    assert complete_page("tut") == ["tutorial"]
    assert main(["docs", "--path"]) == OK
    assert Path(capsys.readouterr().out.strip()) == docs_folder()


def test_docs_prints_a_page_and_its_path(capsys: Capture):
    path = docs_folder() / "how-to" / "train.md"
    for name in ("train", "how-to/train", "how-to/train.md", "docs/how-to/train.md"):
        assert main(["docs", name]) == OK
        printed = capsys.readouterr()
        assert printed.out == path.read_text()
        assert printed.err == f"{path}\n"
    assert main(["docs", "train", "--path"]) == OK
    assert capsys.readouterr().out == f"{path}\n"


UNKNOWN_PAGES = [
    ("trian", "did you mean `train`?"),
    ("pro", "did you mean `prompts-and-chats` or `prove`?"),
    ("reference/train", "did you mean `train`?"),
    ("zzz", "`prep docs` lists the pages"),
]


def test_unknown_page_is_an_error(capsys: Capture):
    for name, hint in UNKNOWN_PAGES:
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


def test_help_names_the_guide(capsys: Capture):
    assert [command.name for command in all_commands() if not command.guide] == ["docs"]
    for command in all_commands():
        if command.guide:
            assert command.guide in page_names()
            assert main([*f"{command.group} {command.name}".split(), "--help"]) == OK
            assert f"Guide: prep docs {command.guide}\n" in capsys.readouterr().out


# `prep env`, in separate processes, because huggingface_hub reads the variables on import


def env(*, list_devices: bool) -> Report:
    return environment_report(read_environment("512MiB", list_devices=list_devices))


PREFIXES = ("HF_", "PREP_", "HUGGING", "XDG_", "TRANSFORMERS_", "NO_COLOR")


def settings_with(**variables: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return each setting's value and source, and all output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    process = run_python(PREP, "env", "--json", env={**inherited, **variables})
    assert process.returncode == 0
    settings = json.loads(process.stdout)["settings"]
    return {
        setting["name"]: (setting["value"], setting["source"]) for setting in settings
    }, process.stdout + process.stderr


def test_env_settings_name_their_source(tmp_path: Path) -> None:
    home = str(tmp_path)
    settings, _ = settings_with(HF_HOME=home, PREP_MEMORY="1GiB", HF_HUB_OFFLINE="1")
    assert settings["HF_HOME"] == (home, "HF_HOME")
    assert settings["HF_HUB_CACHE"] == (f"{home}/hub", "HF_HOME")
    assert settings["PREP_MEMORY"] == ("1GiB", "PREP_MEMORY")
    assert settings["PREP_PROGRESS"] == ("auto", "default")
    assert settings["HF_HUB_OFFLINE"] == ("1", "HF_HUB_OFFLINE")
    assert settings["HF_TOKEN"] == ("-", "default")


def test_env_hides_the_token(tmp_path: Path) -> None:
    settings, printed = settings_with(HF_HOME=str(tmp_path), HF_TOKEN="hf_secret")
    assert settings["HF_TOKEN"] == ("(set, not shown)", "HF_TOKEN")
    assert "hf_secret" not in printed
    (tmp_path / "token").write_text("hf_secret")
    settings, printed = settings_with(HF_HOME=str(tmp_path))
    assert settings["HF_TOKEN"] == ("(set, not shown)", str(tmp_path / "token"))
    assert "hf_secret" not in printed


SLURM_TASK = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "n[3-6]",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"launcher": None, "count": 1, "reason": "no variable of a launcher is set"}),
        (
            SLURM_TASK,
            {"launcher": "SLURM", "count": 4, "index": 3, "address": "n3:61447", "devices": "all"},
        ),
        ({"JAX_NUM_PROCESSES": "2"}, {"launcher": None, "count": None, "index": None}),
    ],
)
def test_env_shows_processes(
    variables: dict[str, str], expected: dict[str, object], monkeypatch: MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith(("JAX_", "SLURM_", "OMPI_", "TPU_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    report = env(list_devices=False)
    processes = report.fields["processes"]
    assert isinstance(processes, dict)
    assert expected.items() <= processes.items()
    assert str(processes["reason"]) in report.text


def test_env_does_not_import_jax_by_default() -> None:
    script = (
        "import sys; from prepcli.commands.operations.about import read_environment;"
        " environment = read_environment('512MiB', list_devices=False);"
        "print(environment.devices, 'jax' in sys.modules, 'torch' in sys.modules)"
    )
    process = run_python(script)
    assert process.stdout == "None False False\n", process.stderr


def test_env_lists_devices_on_request() -> None:
    jax = pytest.importorskip("jax")
    report = env(list_devices=True)
    devices: Any = report.fields["devices"]
    assert len(devices) == len(jax.local_devices())
    assert next(iter(devices)) in report.text


def test_env_shows_why_there_are_no_devices(monkeypatch: MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")

    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    report = env(list_devices=True)
    assert report.fields["devices"] == {
        "none": "jax: JAX_PLATFORMS=cuda names a platform that is not installed"
    }


def test_env_text_lists_missing_packages_and_memory(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("prepcli.core.PACKAGES", ("typer", "no-such-package"))
    lines = env(list_devices=False).text.splitlines()
    assert "no-such-package  not installed" in lines
    assert any(line.startswith("total ") for line in lines)
    assert "not listed  `prep env --devices` imports jax" in lines


# `prep models`: the table of aliases


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


def test_models_of_a_family_have_numbers() -> None:
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
    with pytest.raises(PrepError) as caught:
        aliases_report(list_aliases("gptneo"))
    assert (caught.value.hint, caught.value.code) == ("did you mean `gpt_neo`?", USAGE)


# `prep recipes` on the recipes of the checkout


NAMES = sorted(path.stem for path in recipes_folder().glob("*.toml"))


def test_recipes_lists_every_recipe(capsys: Capture):
    assert NAMES
    assert main(["recipes", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["recipes"]
    assert [entry["name"] for entry in entries] == NAMES
    assert all(entry["summary"] and entry["devices"] >= 1 for entry in entries)
    models = {entry["name"]: entry["model"] for entry in entries}
    assert (models["gpt-neo-1.3b"], models["llama-7b-32k"]) == ("gpt-neo-1.3B", "llama-7b")


def test_recipes_prints_each_recipe(capsys: Capture):
    for name in NAMES:
        assert main(["recipes", name]) == OK
        shipped = tomllib.loads((recipes_folder() / f"{name}.toml").read_text())
        assert tomllib.loads(capsys.readouterr().out) == shipped


# Words after `prep recipes`, and a part of the error
REFUSED_WORDS = [
    (["copy"], "prep recipes copy"),
    (["copy", "gtp2"], "did you mean `gpt2`?"),
    (["gpt2", "llama-7b"], "prep recipes copy"),
    (["gpt2", "--out", "a.toml"], "prep recipes copy"),
    (["lama-7b"], "unknown recipe `lama-7b`"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED_WORDS)
def test_recipes_rejects_words_without_meaning(words: list[str], message: str, capsys: Capture):
    assert main(["recipes", *words]) == USAGE
    assert message in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_recipes_copy_writes_the_file_and_replaces_none(capsys: Capture):
    shipped = (recipes_folder() / "gpt2.toml").read_bytes()
    assert main(["recipes", "copy", "gpt2"]) == OK
    assert main(["recipes", "copy", "gpt2", "--out", "mine.toml"]) == OK
    assert capsys.readouterr().out == "gpt2.toml\nmine.toml\n"
    assert Path("gpt2.toml").read_bytes() == Path("mine.toml").read_bytes() == shipped
    Path("mine.toml").write_text("changed")
    assert main(["recipes", "copy", "gpt2", "--out", "mine.toml"]) == FAILED
    assert Path("mine.toml").read_text() == "changed"
    assert main(["recipes", "copy", "gpt2", "--out", "no/folder.toml"]) == FAILED


def test_find_recipe_takes_the_bare_name_of_a_shipped_recipe():
    assert find_recipe(Path("gpt2")) == recipes_folder() / "gpt2.toml"
    assert find_recipe(Path("gpt2.toml")) == Path("gpt2.toml")
    assert find_recipe(Path("folder/gpt2")) == Path("folder/gpt2")
    Path("gpt2.toml").touch()
    with pytest.raises(UsageError, match="`gpt2` is ambiguous"):
        find_recipe(Path("gpt2"))
    Path("gpt2").mkdir()
    assert find_recipe(Path("gpt2")) == Path("gpt2")


MISSING_RECIPES = [
    ("gpt2.toml", "did you mean `gpt2`, the shipped recipe?"),
    ("recipes/gpt2.toml", "did you mean `gpt2`, the shipped recipe?"),
    ("recipes/gtp2.toml", "did you mean `gpt2`?"),
    ("gpt-neo", "did you mean `gpt-neo-1.3b`, `gpt-neo-1.3b-wikitext`?"),
    ("gtp2", "did you mean `gpt2`?"),
]


def test_missing_training_recipe_suggests_shipped_ones():
    for name, hint in MISSING_RECIPES:
        with pytest.raises(UsageError) as caught:
            find_training_recipe(Path(name))
        assert (caught.value.what, caught.value.hint) == (f"{name} does not exist", hint)


@pytest.mark.parametrize("name", ["gpt2", "gpt2.toml"])
def test_recipe_with_the_name_of_a_folder_is_copied_first(name: str):
    Path("gpt2").mkdir()
    with pytest.raises(UsageError) as caught:
        find_training_recipe(Path(name))
    assert caught.value.hint == "`prep recipes copy gpt2` writes the recipe to gpt2.toml"
    assert main(["recipes", "copy", "gpt2", "-q"]) == OK
    assert find_training_recipe(Path("gpt2.toml")) == Path("gpt2.toml")
    with pytest.raises(UsageError, match=r"`gpt2\.toml`, the recipe in this folder"):
        find_training_recipe(Path("gpt2"))


def test_missing_recipe_keeps_its_path_if_a_file_is_similar():
    Path("gpt2-mime.toml").touch()
    for name in ("folder/unlike.toml", "unlike", "gpt2-mine.toml"):
        assert find_training_recipe(Path(name)) == Path(name)


def test_train_takes_the_name_of_a_shipped_recipe(monkeypatch: MonkeyPatch, capsys: Capture):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["train", "gpt2", "--set", "mesh=8,1,1"]) != OK
    assert "data/train.jsonl" in capsys.readouterr().err
