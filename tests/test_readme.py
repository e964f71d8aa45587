"""README and docs: every command shown runs on tiny models; every command, option, link and file mentioned exists."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from prepcli.commands.cli.docs_page import cli_page
from prepcli.commands.cli.main import main
from prepcli.commands.cli.root import COMMANDS, command_group
from prepcli.commands.testing.checkpoints import read_checkpoint
from tests.helpers.adapters import make_adapter
from tests.helpers.foreign_names import write_foreign_folder
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors
from tests.helpers.tokenizer_folders import write_model
from tests.helpers.trainer_checkpoints import make_trainer_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# The commands of this page change the checkout, so test_add_a_family runs them in a copy.
OWN_TEST = ROOT / "docs" / "how-to" / "add-a-family.md"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: Language of the block.
        title: Name of a file with the text, or "".
        text: The text.
    """

    language: str
    title: str
    text: str

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yield each command line of a console block, with the output shown below it."""
        for part in self.text.split("$ ")[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page."""
    fence = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(language, title, text) for language, title, text in fence.findall(page.read_text())
    ]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tiny models under the names that pages use. Tests only copy it."""
    folder = tmp_path_factory.mktemp("models")
    tensors = make_checkpoint(
        folder / "gpt-neo-1.3B", GPT_NEO, vocab_size=257, hidden_size=64, num_heads=8
    )
    of_torch = folder / "gpt-neo-1.3B-bin"
    of_torch.mkdir()
    (of_torch / "config.json").write_bytes((folder / "gpt-neo-1.3B/config.json").read_bytes())
    (of_torch / "pytorch_model.bin").write_bytes(make_torch_file(tensors))
    make_checkpoint(folder / "llama-13b", LLAMA, vocab_size=256, hidden_size=64)
    make_checkpoint(folder / "out/original", LLAMA)
    write_foreign_folder(folder / "own", read_tensors(folder / "out/original"))
    make_quantized(folder / "llama-13b-fp8", "fp8", base=LLAMA | {"vocab_size": 256})
    write_tokenizer(folder / "gpt-neo-1.3B")
    write_model(folder / "my-model")
    (folder / "tokens.txt").write_text("<tool>\n<result>\n")
    for name in ("text.txt", "validation.txt"):
        (folder / name).write_text(" ".join(WORDS * 4))
    make_adapter(folder / "my-adapter", {"transformer.h.0.attn.attention.q_proj": (64, 64)})
    make_trainer_checkpoint(folder / "out/checkpoint-400", 400)
    # A step in place of a run, which takes a training. The folder of its source names it.
    make_trainer_checkpoint(folder / "out/tuned", 400)
    step = ("save-init", str(folder / "out/tuned"), "--training-state")
    assert main([*step, "--out", str(folder / "runs/tuned"), "-q"]) == 0
    return folder


@pytest.fixture
def models(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a copy of `model_folder`. A folder takes precedence over an alias."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def write_files(page: Path, folder: Path) -> None:
    """Write each block of a page with the name of a file: as its title, or in a comment of a recipe."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        if block.language == "toml" and (name := re.match(r"# (\S+\.toml)\n", block.text)):
            (folder / name[1]).write_text(block.text)


def has_console(page: Path) -> bool:
    """Return whether a page shows commands to run."""
    return any(block.language == "console" for block in blocks(page))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if has_console(p) and p != OWN_TEST], ids=lambda page: page.name
)
def test_commands_shown_work_and_print_the_output_shown(
    page: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(page, models)
    commands = [
        shown for block in blocks(page) if block.language == "console" for shown in block.commands()
    ]
    for command, output in commands:
        program, *args = shlex.split(command)
        assert program == "prep"
        assert main(args) == 0, f"{command}\n{capsys.readouterr().err}"
        printed = capsys.readouterr().out
        assert not output or printed == output, command


def test_how_to_guides_show_commands():
    """The guides without a console block need a bucket or a trained run, or have a test of their own."""
    guides = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    assert [page.name for page in guides if not has_console(page)] == [
        "add-a-family.md",
        "buckets.md",
    ]


def run_script(script: str) -> str:
    """Run a script of a page in this process, which has 8 devices, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "<page>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_python_of_the_readme_works(models: Path) -> None:
    (script,) = [block.text for block in blocks(README) if block.language == "python"]
    result, shape = run_script(script).splitlines()
    assert result.startswith("init ")
    assert shape == "(3, 8, 8, 64)"


@pytest.mark.parametrize("number", slow_except((0, 1), (0,)))
def test_python_of_the_flax_guide_fine_tunes_and_exports(models: Path, number: int) -> None:
    pytest.importorskip("flax")
    scripts = [
        block.text for block in blocks(ROOT / "docs/how-to/flax.md") if block.language == "python"
    ]
    assert len(scripts) == 2
    printed = run_script(scripts[number])
    losses = [float(loss) for loss in re.findall(r"^loss (.*)$", printed, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    before, tuned = read_checkpoint(models / "gpt-neo-1.3B"), read_checkpoint(models / "tuned")
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
    names = [command.name for command in COMMANDS if not command.group]
    assert sorted(listed) == sorted([*names, "launch"])
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
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = re.findall(r"`((?:tests|trainer|docs|prepcli)/[\w/.]+)`", text)
    assert [path for path in links if not (page.parent / path).exists()] == []
    assert [path for path in files if not (ROOT / path).exists()] == []


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
