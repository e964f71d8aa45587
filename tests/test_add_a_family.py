"""The guide: in a copy of the checkout its steps are followed as they stand, with the code that it shows."""

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

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "add-a-family.md"
COPIED_FOLDERS = ("bench", "prepcli", "tests", "trainer")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block: its language, the file that it is for, what is in it."""

    language: str
    file: str
    text: str

    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command, with what is shown as its output."""
        for part in self.text.split("$ ")[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def code_blocks() -> list[CodeBlock]:
    return [CodeBlock(*found) for found in re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)]


def apply_diff(text: str, diff: str) -> str:
    """A text with the hunks of a diff, each of which has to fit at one place."""
    for hunk in diff.split("@@\n"):
        lines = [(line[0], line[1:]) for line in hunk.splitlines()]
        before, after = ("".join(f"{line}\n" for sign, line in lines if sign in signs) for signs in (" -", " +"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def run_command(command: str, folder: Path) -> str:
    """What a command of the guide prints, run in a copy of the checkout."""
    program, *arguments = shlex.split(command)
    words = {"python": [sys.executable], "prep": [sys.executable, "-m", "prepcli"]}[program]
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*words, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def mask_rounding_errors(text: str) -> str:
    """A text without the digits of rounding errors."""
    return re.sub(r"\d\.\de-0[678]", "small", text)


def test_its_steps_work(tmp_path: Path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for name in COPIED_FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shown = 0
    for step in code_blocks():
        path = tmp_path / step.file
        if step.language == "diff":
            path.write_text(apply_diff(path.read_text(), step.text))
        elif step.file:
            assert not path.exists()
            path.write_text(step.text)
        for command, output in step.commands() if step.language == "sh" else ():
            printed = run_command(command, tmp_path)
            assert not output or mask_rounding_errors(printed) == mask_rounding_errors(output), printed
            shown += 1
    assert shown == 5


def test_the_family_that_it_shows_is_in_the_style_of_the_others():
    (text,) = (step.text for step in code_blocks() if step.language == "python")
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 120
