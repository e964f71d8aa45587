"""Follow the steps of docs/how-to/add-a-family.md, with its code, in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.slow_cases import slow_except

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "how-to" / "add-a-family.md"
COPIED_FOLDERS = ("bench", "prepcli", "tests", "trainer")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced code block of the guide: language, file to write (or ""), and content."""

    language: str
    file: str
    text: str

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yield each shell command of the block with its output in the guide."""
        for part in self.text.split("$ ")[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def code_blocks() -> list[CodeBlock]:
    """Return the fenced code blocks of the guide."""
    blocks = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    return [CodeBlock(language=language, file=file, text=text) for language, file, text in blocks]


def apply_diff(text: str, diff: str) -> str:
    """Apply the hunks of a diff to a text; each hunk must match exactly one place."""
    for hunk in diff.split("@@\n"):
        lines = [(line[0], line[1:]) for line in hunk.splitlines()]
        before, after = (
            "".join(f"{line}\n" for sign, line in lines if sign in signs) for signs in (" -", " +")
        )
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def run_command(command: str, folder: Path) -> str:
    """Run a command of the guide in a copy of the checkout, and return its output."""
    program, *arguments = shlex.split(command)
    interpreter = {"python": [sys.executable], "prep": [sys.executable, "-m", "prepcli"]}[program]
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [*interpreter, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}{process.stderr}"
    return process.stdout


def select_check(output: str, check: str) -> str:
    """Return the title and the line of one check from the output of `check-family`, without the column widths."""
    title, *lines = output.splitlines(keepends=True)
    return re.sub(" +", " ", title + "".join(line for line in lines if line.startswith(check)))


def mask_rounding_errors(text: str) -> str:
    """Replace the digits of rounding errors in a text; an error may be zero."""
    return re.sub(r"\d\.\de-0[678]|0\.0e\+00", "small", text)


@pytest.mark.parametrize("check", slow_except(["logits", ""], ["logits"]))
def test_guide_steps_work(tmp_path: Path, check: str):
    """Run all commands; of `check-family`, the named check, or all checks in the slow test."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for name in COPIED_FOLDERS:
        # With the bytecode of the modules, which is valid for copies of the same age.
        shutil.copytree(ROOT / name, tmp_path / name)
    n_commands = 0
    for block in code_blocks():
        path = tmp_path / block.file
        if block.language == "diff":
            path.write_text(apply_diff(path.read_text(), block.text))
        elif block.file:
            assert not path.exists()
            path.write_text(block.text)
        for command, output in block.commands() if block.language == "sh" else ():
            is_one_check = check and command.startswith("prep check-family")
            printed = run_command(
                f"{command} --check {check}" if is_one_check else command, tmp_path
            )
            if is_one_check:
                printed, output = (select_check(text, check) for text in (printed, output))
            assert not output or mask_rounding_errors(printed) == mask_rounding_errors(output), (
                printed
            )
            n_commands += 1
    assert n_commands == 5


def test_guide_family_file_is_short():
    (text,) = (block.text for block in code_blocks() if block.language == "python" and block.file)
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
