"""Tables of the commands in terminals of 60, 80 and 120 columns: no line is longer, and no name is cut."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.errors import OK, USAGE
from prepcli.sources.aliases import ALIASES
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint, read_tensors

WIDTHS = (60, 80, 120)


class Terminal(io.StringIO):
    """Stdout of a command in a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(folder, GPT_NEO)
    return folder


def run_in_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *words: str) -> list[str]:
    """Run a command on a terminal of this width, and return the lines of stdout, none of which is longer."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(width))
        assert main([*words]) == OK
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in terminal.getvalue()
    return lines


def first_words(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines if line.strip()}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("option", [(), ("--stats",)])
def test_inspect_shows_whole_names(
    monkeypatch: pytest.MonkeyPatch, model: Path, option: tuple[str, ...], width: int
) -> None:
    monkeypatch.chdir(model.parent)
    lines = run_in_terminal(monkeypatch, width, "inspect", "model", *option)
    assert set(read_tensors(model)) <= first_words(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_inspect_of_an_init_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, model: Path, width: int
) -> None:
    monkeypatch.chdir(model.parent)
    if not Path("init").exists():
        assert main(["save-init", "model", "--mesh", "1,1,1", "--out", "init", "-q"]) == OK
    lines = run_in_terminal(monkeypatch, width, "inspect", "init")
    assert {"params.embed.tokens", "params.layers.attn.q.weight"} <= first_words(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_inspect_tree_shows_whole_names(
    monkeypatch: pytest.MonkeyPatch, model: Path, width: int
) -> None:
    monkeypatch.chdir(model.parent)
    lines = run_in_terminal(monkeypatch, width, "inspect", "model", "--tree")
    assert {"attn.attention", "q_proj.weight", "wte.weight"} <= first_words(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_models_shows_whole_aliases_and_hub_ids(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = run_in_terminal(monkeypatch, width, "models")
    words = {word for line in lines for word in line.split()}
    assert {alias.name for alias in ALIASES} | {alias.hub_id for alias in ALIASES} <= words


@pytest.mark.parametrize("width", WIDTHS)
def test_recipes_shows_whole_names(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = run_in_terminal(monkeypatch, width, "recipes")
    assert {path.stem for path in recipes_folder().glob("*.toml")} <= first_words(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = run_in_terminal(monkeypatch, width, "plan", "llama-7b-32k")
    assert any("A100-80" in line for line in lines)


def test_plan_search_ends_with_the_best_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    search = ("plan", "llama-7b-32k", "--devices", "v5p", "--search")
    lines = run_in_terminal(monkeypatch, 80, *search)
    meshes = [line.split()[0] for line in lines if line.startswith("dp:")]
    assert len(meshes) == 10
    assert lines[-1] == f"best: `--mesh {meshes[0]}`"
    assert any(line.endswith(" slower ones that fit; `-v` lists all") for line in lines)
    all_lines = run_in_terminal(monkeypatch, 80, *search, "-v")
    assert len([line for line in all_lines if line.startswith("dp:")]) > 10
    assert all_lines[-1] == lines[-1]


def test_plan_search_prints_all_meshes_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-7b-32k", "--devices", "v5p", "--search", "--offline"]) == OK
    assert (
        len([line for line in capsys.readouterr().out.splitlines() if line.startswith("dp:")]) > 10
    )


def test_plan_search_lists_each_reason_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run_in_terminal(
        monkeypatch, 80, "plan", "llama-7b-32k", "--devices", "v5p:7", "--search"
    )
    assert "  1 x heads 32 cannot be split over mp 7" in lines


def test_unknown_leaf_is_a_short_error(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["inspect", "model", "--shards", "nothing", "--mesh", "1,1,1"]) == USAGE
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) < 120
    assert lines[-1] == " hint: `prep save-init model --dry-run -v` shows the names"
