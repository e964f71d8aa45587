"""README and docs: blocks run on tiny models, and every command, option, link, key and file mentioned exists."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.docs_page import cli_page
from prepcli.commands.cli.main import main
from prepcli.commands.cli.root import all_commands, command_group
from prepcli.commands.demo.tiny_model import learnable_text, write_tiny_model
from prepcli.commands.testing.checkpoints import read_checkpoint
from prepcli.core.errors import OK, STOPPED
from tests.helpers.doc_tables import check_names, code_in, table_rows
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.page_inputs import copy_input
from tests.helpers.slow_cases import slow_except
from trainer.recipe.tables import KEY_SCHEMAS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
DOCS = ROOT / "docs"
GUIDES_FOLDER = DOCS / "how-to"
FAMILY_GUIDE = GUIDES_FOLDER / "add-a-family.md"
FLAX_GUIDE = GUIDES_FOLDER / "flax.md"
# Tests below compare what the scripts of these pages print.
SCRIPTS_WITH_TESTS = (README, FLAX_GUIDE)
# test_add_a_family runs the commands of FAMILY_GUIDE, and compares its code with the checkout.
GUIDES = [page for page in sorted(GUIDES_FOLDER.glob("*.md")) if page != FAMILY_GUIDE]
# Pages that train, generate, or start processes for more than a second. By default the session of the README, and pages
# on each other subject, show that blocks are run.
SLOW_PAGES = (
    "any-model.md", "buckets.md", "convert.md", "evaluate.md", "generate.md", "launch.md", "lora.md", "notebooks.md",
    "other-trainers.md", "plan.md", "prove.md", "train.md", "training-state.md", "tutorial.md",
)  # fmt: skip
# The setup of pages without one, outside of the guides.
DEFAULT_SETUP = "gpt-neo-1.3B text.txt"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: Language of the block.
        title: Name of a file with the text, or "".
        text: The text.
        is_run: Whether no comment above says why the block is not run.
    """

    language: str
    title: str
    text: str
    is_run: bool = True

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yield each command line of a console block, with the output shown below it."""
        for part in self.text.replace("\\\n", " ").split("$ ")[1:]:
            command, _, output = part.partition("\n")
            yield command, output

    def file(self) -> str:
        """Return the name of the file that has the text: the title, or the first comment of a recipe."""
        name = re.match(r"# (\S+\.toml)\n", self.text) if self.language == "toml" else None
        return name[1] if name else self.title


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page."""
    fence = re.compile(
        r"^(<!-- not run: [^\n]+ -->\n)?```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    return [
        Block(language, title, text, is_run=not reason)
        for reason, language, title, text in fence.findall(page.read_text())
    ]


def write_files(page: Path, folder: Path) -> None:
    """Write each block of a page that has the name of a file."""
    for block in blocks(page):
        if file := block.file():
            (folder / file).write_text(block.text)


def inputs_of(page: Path) -> list[str]:
    """Return the inputs in the comment `<!-- setup: NAME NAME -->` of a page.

    They are names of `tests.helpers.page_inputs`, or URLs of objects with such a name.
    """
    comment = re.search(r"<!-- setup:(.*?)-->", page.read_text(), re.DOTALL)
    return (comment[1] if comment else DEFAULT_SETUP).split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without access to the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    """Serve buckets on the loopback interface."""
    with use_objects(monkeypatch) as store:
        yield store


def copy_inputs(names: Sequence[str], folder: Path, objects: FakeObjectStore) -> None:
    """Copy the inputs of a page to its folder, and those of URLs to the store."""
    for name in names:
        _, is_url, key = name.partition("://")
        if not is_url:
            copy_input(name, folder)
            continue
        with tempfile.TemporaryDirectory() as work:
            copy_input(Path(key).name, Path(work))
            root = Path(work, Path(key).name)
            for file in root.iterdir():
                objects.objects[f"{key}/{file.name}"] = file.read_bytes()


def run_command(command: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command line of a page, and compare what it prints with the output shown, if there is one."""
    program, *words = shlex.split(command)
    assert program == "prep"
    capsys.readouterr()
    code = main(words)
    printed = capsys.readouterr()
    # A run that `--stop-after` ends is stopped.
    assert code == (STOPPED if "--stop-after" in words else OK), f"{command}\n{printed.err}"
    assert not output or printed.out == output, command


def run_script(script: str, names: dict[str, Any] | None = None) -> str:
    """Run a script of a page in this process, which has 8 devices, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(
            compile(script, "<page>", "exec"), {"__name__": "__main__"} if names is None else names
        )
    return printed.getvalue()


def languages_of(page: Path) -> tuple[str, ...]:
    """Return the languages of blocks that are run. The Python blocks of the reference are signatures."""
    if page in SCRIPTS_WITH_TESTS or page.parent.name == "reference":
        return ("console",)
    return ("console", "python")


def run_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Write the files of a page and run its commands and scripts, in their order."""
    # Later scripts of a page use the names of earlier ones.
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if file := block.file():
            Path(file).write_text(block.text)
        elif not block.is_run or block.language not in languages_of(page):
            continue
        elif block.language == "console":
            for command, output in block.commands():
                run_command(command, output, capsys)
        else:
            run_script(block.text, names)


def has_runs(page: Path) -> bool:
    """Return whether a page shows commands or scripts to run."""
    languages = languages_of(page)
    return any(block.language in languages for block in blocks(page) if block.is_run)


@pytest.mark.parametrize(
    "page",
    slow_except(
        [page for page in PAGES if has_runs(page) and page != FAMILY_GUIDE],
        lambda page: page.name not in SLOW_PAGES,
    ),
    ids=lambda page: page.name,
)
def test_blocks_of_a_page_run_from_its_setup(
    page: Path,
    folder: Path,
    objects: FakeObjectStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_inputs(inputs_of(page), folder, objects)
    install_display(monkeypatch)
    run_page(page, capsys)


def install_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module `IPython.display` that shows nothing, as outside of a notebook."""
    display: Any = ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda *args, **kwargs: None
    package: Any = ModuleType("IPython")
    package.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_guide_states_its_setup_and_why_a_block_is_not_run(page: Path) -> None:
    """Commands are in console blocks, or say above why they are not run."""
    assert "<!-- setup:" in page.read_text()
    for block in blocks(page):
        shows_commands = block.language in ("sh", "bash") or block.text.startswith("$ ")
        if shows_commands and block.language != "console":
            assert not block.is_run, block.text
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"\n\n    \S", outside), "an indented block is not run"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if DOCS in page.parents], ids=lambda page: page.name
)
def test_page_opens_with_its_readers(page: Path) -> None:
    """The first sentence says who a page is for, and that of a guide what its readers have at the end."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    first = text.partition("\n\n")[2].strip().partition("\n\n")[0]
    assert re.search(r"\bfor\b", first, re.IGNORECASE), first
    if page.parent == GUIDES_FOLDER:
        assert re.match(r"For .*?: at\s+the\s+end\b", first, re.DOTALL), first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_of_a_page_have_known_keys(page: Path) -> None:
    """Parts of a recipe may be without the head of their table."""
    names = {name for key in KEY_SCHEMAS for name in (key, key.partition(".")[2])}
    for block in blocks(page):
        for key, value in tomllib.loads(block.text if block.language == "toml" else "").items():
            keys = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
            assert [name for name in keys if name not in names] == []


def test_session_of_the_readme_works_beside_the_demo(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the commands beside the files of `prep demo`. The last line of an output shown is the one of stdout."""
    write_tiny_model(folder / "prep-demo" / "tiny")
    (folder / "prep-demo" / "tiny.txt").write_text(learnable_text())
    (session,) = [block for block in blocks(README) if block.text.startswith("$ ")]
    (recipe,) = [block for block in blocks(README) if block.language == "toml"]
    (copy, _), *commands = session.commands()
    subprocess.run(copy, shell=True, check=True)
    monkeypatch.chdir(folder / "mine")
    Path("tuned.toml").write_text(recipe.text)
    for line, output in commands:
        # This process has 8 devices.
        _, *words = shlex.split(line.removeprefix("JAX_NUM_CPU_DEVICES=8 "))
        assert main(words) == OK, f"{line}\n{capsys.readouterr().err}"
        printed = re.sub(r"[\d.]+ s\)$", "… s)", capsys.readouterr().out.strip())
        shown = re.sub(r"[\d.]+ s\)$", "… s)", output.strip())
        assert printed == shown.splitlines()[-1], line


def test_python_of_the_readme_works(folder: Path) -> None:
    copy_input("gpt-neo-1.3B", folder)
    (script,) = [block.text for block in blocks(README) if block.language == "python"]
    names: dict[str, Any] = {"__name__": "__main__"}
    run_script(script, names)
    assert names["init"].path.name == "init"
    assert names["params"]["layers"]["attn"]["q"]["weight"].shape == (3, 8, 8, 64)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_python_of_the_flax_guide_fine_tunes_and_exports(folder: Path, number: int) -> None:
    pytest.importorskip("flax")
    copy_input("gpt-neo-1.3B", folder)
    scripts = [block.text for block in blocks(FLAX_GUIDE) if block.language == "python"]
    assert len(scripts) == 2
    printed = run_script(scripts[number])
    losses = [float(loss) for loss in re.findall(r"^loss (.*)$", printed, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    before, tuned = read_checkpoint(folder / "gpt-neo-1.3B"), read_checkpoint(folder / "tuned")
    assert {name: tensor.shape for name, tensor in tuned.items()} == {
        n: t.shape for n, t in before.items()
    }
    assert not np.array_equal(tuned["transformer.wte.weight"], before["transformer.wte.weight"])


def test_cli_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == cli_page()


def test_site_lists_every_page() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == pages


def test_home_of_the_site_lists_every_command() -> None:
    home = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"^\| `prep ([a-z-]+)` \|", home, re.MULTILINE)
    names = dict.fromkeys(command.group or command.name for command in all_commands())
    assert listed == [name for name in names if name != "map"], "the order of `prep --help`"
    assert blocks(README)[0] in blocks(ROOT / "docs" / "index.md"), "the same line installs prep"
    assert "](overview.svg)" in home


def test_site_highlights_code_and_can_copy_it(tmp_path: Path) -> None:
    """Needs the `docs` extra."""
    pytest.importorskip("material")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    page = (tmp_path / "index.html").read_text()
    assert '<div class="language-bash highlight"' in page
    assert '"content.code.copy"' in page


def test_readme_begins_with_the_set_up_commands() -> None:
    """.ci/run runs these two blocks as they are."""
    first, second = blocks(README)[:2]
    assert first == Block("bash", "", "pip install -e . && prep demo\n")
    assert second == Block("bash", "", "pip install -e '.[test]' && pytest\n")
    assert len(README.read_text().splitlines()) <= 200


@cache
def options_of(command: str) -> set[str]:
    """Return the options of a command, e.g. of `launch slurm`, or those of `prep` itself."""
    named = command_group()
    for name in command.split():
        named = named.commands[name]
    options = {"--help"}
    for parameter in named.params:
        options |= {*parameter.opts, *parameter.secondary_opts}
    return options


def check_options(command: str, words: str) -> None:
    """Check that a command has the options among words."""
    for option in re.findall(r"--[a-z-]+", words):
        assert option in options_of(command), f"prep {command} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    pattern = r"`prep ((?:launch )?[a-z][a-z-]*)?([^`]*)`"
    for command, rest in re.findall(pattern, page.read_text()):
        # `prep launch ENGINE -- COMMAND`: the words after `--` are those of another command.
        own, _, launched = rest.partition(" -- ")
        check_options(command, own)
        name, _, words = launched.partition(" ")
        if name in command_group().commands:
            check_options(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text)
    files = re.findall(r"`((?:tests|trainer|docs|prepcli)/[\w/.]+)`", text)
    assert [path for path in links if not (page.parent / path).exists()] == []
    assert [path for path in files if not (ROOT / path).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the site makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = [
        re.sub(r"[^\w\s-]", "", title.lower()) for title in re.findall(r"^#+ (.*)", text, re.M)
    ]
    return {re.sub(r"\s+", "-", title.strip()) for title in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_reach_a_heading(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", page.read_text()):
        target = page.parent / path if path else page
        assert anchor in anchors_of(target), f"{path}#{anchor}"


def test_each_measurement_has_its_date_and_commit() -> None:
    _, *sections = (DOCS / "reference" / "measurements.md").read_text().split("\n## ")
    for section in sections:
        assert re.search(r"\b20\d\d-\d\d-\d\d, [0-9a-f]{8}\b", section), section.splitlines()[0]


def test_site_builds_without_a_message(tmp_path: Path) -> None:
    """The site has no broken link. Needs the `docs` extra."""
    pytest.importorskip("material")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


PAGE = ROOT / "docs" / "explanation" / "exactness.md"
ROWS = [cells for title, cells in table_rows(PAGE) if title == "#"]
CAPABILITIES = 94
NOT_THERE = ("not supported", "out of scope")


def test_coverage_page_has_every_capability_once():
    assert [int(cells[0]) for cells in ROWS] == list(range(1, CAPABILITIES + 1))


def test_coverage_page_names_keys_and_commands_that_exist(capsys: pytest.CaptureFixture[str]):
    names = {name for cells in ROWS for name in code_in(cells[2])}
    check_names(sorted(names), capsys)


def test_coverage_page_shows_each_capability():
    for cells in ROWS:
        files = [name for name in code_in(cells[3]) if (ROOT / name).is_file()]
        assert len(files) == len(code_in(cells[3])), cells[1]
        assert files or cells[3].startswith("[") or cells[2] in NOT_THERE, cells[1]
