"""Run rendered scripts in bash with recorders in place of their programs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from hypothesis import strategies as st

from tests.helpers.waiting import MAX_S

# A program that appends its words and variables to calls.jsonl, and exits with the next line of NAME.codes
RECORDER = f"""#!{sys.executable} -IS
import json, os, sys
from pathlib import Path
folder, name = Path(os.environ["RECORDS"]), Path(sys.argv[0]).name
# One write each: the processes of a job run at once.
with (folder / "calls.jsonl").open("ab", buffering=0) as file:
    file.write(json.dumps([name, sys.argv[1:], dict(os.environ)]).encode() + b"\\n")
codes = folder / f"{{name}}{{os.environ.get('JAX_PROCESS_ID', '')}}.codes"
code, _, rest = codes.read_text().partition("\\n") if codes.exists() else ("0", "", "")
codes.write_text(rest)
if name == "srun" and "prep" in sys.argv:  # runs the command as one task
    os.execvp("prep", sys.argv[sys.argv.index("prep"):])
if name == "pbsdsh":  # runs the command as the task of a node
    os.execvp("env", sys.argv[sys.argv.index("--") + 1:])
if name == "qsub":
    (folder / "qsub.stdin").write_bytes(sys.stdin.buffer.read())
if name == "gcloud" and "ssh" in sys.argv:  # reads its stdin as ssh does, and runs the command as one host
    sys.stdin.read()
    command = next(word for word in sys.argv if word.startswith("--command="))
    os.execvp("bash", ["bash", "-c", command.removeprefix("--command=")])
if name == "gcloud" and "describe" in sys.argv:  # prints the next state of the TPU
    states = folder / "states"
    state, _, rest = states.read_text().partition("\\n")
    states.write_text(rest or state)
    print(state)
sys.exit(int(code or 0))
"""
PROGRAMS = ("prep", "srun", "scontrol", "gcloud", "pbsdsh", "qsub", "module", "sleep")

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
words = texts.filter(bool)
lines = words.filter(lambda text: len(text.splitlines()) == 1 and text.splitlines()[0] == text)


class Calls:
    """The recorded calls of a script.

    Attributes:
        code: Exit code of the script.
        calls: Program, words and environment variables of each call.
    """

    def __init__(self, code: int, calls: list[tuple[str, list[str], dict[str, str]]]) -> None:
        self.code = code
        self.calls = calls

    @classmethod
    def read(cls, folder: Path, code: int = 0) -> Calls:
        """Return the calls of the recorders of a folder."""
        calls = [tuple(json.loads(line)) for line in (folder / "calls.jsonl").open()]
        return cls(code, calls)

    def words_of(self, program: str) -> list[list[str]]:
        """Return the words of each call of a program."""
        return [words for name, words, _ in self.calls if name == program]

    def variables_of(self, program: str) -> dict[str, str]:
        """Return the environment variables of the first call of a program."""
        return next(variables for name, _, variables in self.calls if name == program)


def install_recorders(folder: Path) -> None:
    """Write the recorders to a folder."""
    for name in PROGRAMS:
        (folder / name).write_text(RECORDER)
        (folder / name).chmod(0o755)
    # Login shells set PATH.
    (folder / ".bash_profile").write_text(f"PATH={shlex.quote(str(folder))}:$PATH\n")


def run_script(
    script: str,
    folder: Path,
    *,
    codes: dict[str, list[int]] | None = None,
    states: tuple[str, ...] = ("ACTIVE",),
    is_file: bool = False,
    **env: str,
) -> Calls:
    """Run a script with the recorders of a folder as its programs.

    Args:
        script: The script, which `bash -n` must accept.
        folder: The folder with the recorders.
        codes: Exit codes of the calls of each program; 0 after the last. `prep1` is process 1 of a job.
        states: States of a TPU that `gcloud` reports; the last one again and again.
        is_file: Whether the script is read from a file, and not from stdin.
        **env: Environment variables.
    """
    (folder / "calls.jsonl").write_text("")
    (folder / "states").write_text("\n".join(states))
    for earlier in folder.glob("*.codes"):
        earlier.unlink()
    for name, numbers in (codes or {}).items():
        (folder / f"{name}.codes").write_text("\n".join(map(str, numbers)))
    assert subprocess.run(["bash", "-n"], input=script, encoding="utf-8").returncode == 0
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORDS": str(folder),
        "HOME": str(folder),
        **env,
    }
    (folder / "script").write_text(script, "utf-8")
    words = ["bash", "script" if is_file else "-s"]
    done = subprocess.run(
        words, input=script, encoding="utf-8", env=environ, cwd=folder, timeout=MAX_S
    )
    return Calls.read(folder, done.returncode)
