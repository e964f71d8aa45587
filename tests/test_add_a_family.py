"""Follow the steps of docs/how-to/add-a-family.md, whose code is that of a family in the checkout."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "how-to" / "add-a-family.md"


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


def shipped_code(block: CodeBlock) -> str:
    """Return the text that the checkout has after a step: a whole file, or the lines that a diff leaves."""
    if block.language != "diff":
        return block.text
    lines = block.text.splitlines(keepends=True)
    return "".join(line[1:] for line in lines if not line.startswith("-"))


def run_command(command: str, folder: Path) -> str:
    """Run a command of the guide, and return its output."""
    program, *arguments = shlex.split(command)
    interpreter = {"python": [sys.executable], "prep": [sys.executable, "-m", "prepcli"]}[program]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
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


@pytest.mark.slow
@pytest.mark.parametrize("check", ["logits", ""])
def test_guide_steps_work(tmp_path: Path, check: str):
    """Run all commands; of `check-family`, the named check, or all checks."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    n_commands = 0
    for block in code_blocks():
        if block.file.endswith(".py"):
            assert shipped_code(block) in (ROOT / block.file).read_text()
        elif block.file:
            (tmp_path / block.file).write_text(block.text)
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
