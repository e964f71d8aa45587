"""The process that compiles: its phases, its time limit, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from trainer.distributed.compilation import CompileWatch, run_compile_process

ENDLESS = """
import os, time
from trainer.distributed.compilation import read_request, report_phase
path = read_request()
report_phase("compile")
open(path, "w").write(str(os.getpid()))
time.sleep(3600)
"""


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a module that never answers and writes its process id to the file of the request."""
    (tmp_path / "endless_module.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}")
    return "endless_module"


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_failed_process_is_reported_with_its_last_line():
    with pytest.raises(
        PrepError, match=r"the compilation failed - exit code 1: .*No module named 'nowhere'"
    ):
        run_compile_process("nowhere.at_all", "{}", 1)


def test_process_without_an_answer_is_reported():
    with pytest.raises(PrepError, match="the compilation failed - exit code 0: no message"):
        run_compile_process("keyword", "{}", 1)


def test_phases_are_reported_again_while_they_last(endless: str, tmp_path: Path):
    phases = list[tuple[str, float]]()

    def on_phase(phase: str, elapsed_s: float) -> None:
        phases.append((phase, elapsed_s))
        if [name for name, _ in phases].count("compile") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_compile_process(endless, f'"{tmp_path / "pid"}"', 1, CompileWatch(on_phase, note_s=0.1))
    assert [name for name, _ in phases][-3:] == ["compile"] * 3
    times = [elapsed_s for _, elapsed_s in phases]
    assert times == sorted(times)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_limit_ends_the_process_and_names_its_phase(endless: str, tmp_path: Path):
    with pytest.raises(
        PrepError, match=r"the step was not compiled within 0\.01 s - its last phase was `"
    ) as caught:
        run_compile_process(endless, f'"{tmp_path / "pid"}"', 1, CompileWatch(limit_s=0.01))
    assert "--compile-timeout" in caught.value.hint


def test_process_ends_with_its_killed_parent(endless: str, tmp_path: Path):
    script = f"""
from trainer.distributed.compilation import CompileWatch, run_compile_process
run_compile_process({endless!r}, {f'"{tmp_path / "pid"}"'!r}, 1, CompileWatch(lambda *phase: print(*phase, flush=True)))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    pid = int((tmp_path / "pid").read_text())
    while is_running(pid):
        pass
