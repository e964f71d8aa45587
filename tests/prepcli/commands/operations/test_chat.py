"""`prep generate --chat` in a pseudo-terminal and in a pipe, and prompts that are conversations."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_json
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer
from tests.helpers.waiting import MAX_S, wait_until_asleep

# Words of the vocabulary: w1 is the system, w2 a user, w3 the assistant, w4 a tool, w5 a variable.
TEMPLATE = (
    "{% for tool in tools or [] %}w4 {{ tool.function.name }} {% endfor %}{% for m in messages %}"
    "{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[m.role] }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w3{% if flag is defined %} w5{% endif %}{% endif %}"
)
# Ctrl-C reaches the processes of which the terminal is the controlling one.
TAKE_TERMINAL = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from prepcli.commands.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
TOOL = {"type": "function", "function": {"name": "w7"}}


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """Make a model `tiny` with a tokenizer and a chat template in the current folder."""
    make_checkpoint(Path("tiny"), LLAMA, eos_token_id=None)
    write_tokenizer(Path("tiny"))
    Path("tiny/chat_template.jinja").write_text(TEMPLATE)
    Path("tools.json").write_text(json.dumps([TOOL]))
    return tmp_path


def prompt_texts(capsys: Capture, *words: str) -> list[str]:
    """Return the prompts of a command as the template renders them."""
    report = run_json(capsys, "generate", "tiny", "--max-new-tokens", "3", *words)
    assert report["ok"], report
    for text, ids in zip(report["prompts"], report["prompt_tokens"], strict=True):
        assert " ".join(WORDS[token] for token in ids) == text
    return report["prompts"]


def test_prompts_file_has_conversations(work_dir: Path, capsys: Capture):
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "w9"}]},
        {"messages": [{"role": "user", "content": "w9"}], "tools": [TOOL, TOOL]},
        {"prompt": [{"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}]},
        {"messages": '[{"role": "user", "content": "w9"}]'},
        {"prompt": "w6 w6"},
    ]
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--prompts", "chat.jsonl")
    expected = ["w2 w9 w3", "w4 w7 w4 w7 w2 w9 w3", "w1 w8 w2 w9 w3", "w2 w9 w3", "w6 w6"]
    assert prompt_texts(capsys, *words) == expected
    words = (*words, "--tools", "tools.json", "--template-args", '{"flag": 1}')
    expected = [
        "w4 w7 w2 w9 w3 w5",
        "w4 w7 w4 w7 w2 w9 w3 w5",
        "w4 w7 w1 w8 w2 w9 w3 w5",
        "w4 w7 w2 w9 w3 w5",
        "w6 w6",
    ]
    assert prompt_texts(capsys, *words) == expected


def test_python_takes_conversations(work_dir: Path):
    conversation = [{"role": "user", "content": "w9"}]
    result = prep.generate(
        "tiny", conversations=[conversation], template_args={"flag": True}, max_new_tokens=2
    )
    assert result.prompts == ("w2 w9 w3 w5",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "w1", "--system", "w2"], "`--system` has no effect without `--chat`"),
        (["--chat", "--prompt", "w1"], "`--chat` takes no prompts"),
        (["--prompt", "w1", "--tools", "tools.json"], "`--tools` has no effect"),
        (["--chat", "--template-args", "[1]"], "`--template-args` is not a JSON object"),
        (["--chat", "--template-args", "{"], "`--template-args` is not JSON"),
        (["--prompt", "w1", "--stop", ""], "`--stop` is empty"),
        (["--chat", "--template-args", '{"messages": 1}'], "`messages` is not a variable"),
    ],
)
def test_invalid_options_of_chats_are_errors(
    work_dir: Path, capsys: Capture, words: list[str], message: str
):
    assert error_lines(capsys, "generate", "tiny", *words)[0].startswith(f"error: {message}")


@pytest.mark.parametrize("words", [["--prompt", "w9 \udcff"], ["--chat", "--system", "w6 \udcff"]])
def test_text_must_be_utf8(work_dir: Path, capsys: Capture, words: list[str]):
    (line, why, hint) = error_lines(capsys, "generate", "tiny", *words)
    assert line.endswith(" is not UTF-8 text")
    assert "surrogate" in why
    assert "convert it to UTF-8" in hint


@pytest.mark.slow
def test_turn_of_a_pipe_must_be_utf8(work_dir: Path):
    Path("turns.txt").write_bytes(b"w9\n\xff w8\n")
    words = ("--chat", "--max-new-tokens", "2")
    process = run_python(PREP, "generate", "tiny", *words, has_jax=True, stdin="turns.txt")
    assert process.returncode == 1
    assert len(process.stdout.split()) == 2
    assert "not UTF-8 text" in process.stderr


def chat(monkeypatch: MonkeyPatch, capsys: Capture, turns: str, *words: str) -> tuple[str, str]:
    """Answer turns of a pipe in this process, and return stdout and stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    capsys.readouterr()
    assert main(["generate", "tiny", "--chat", "--max-new-tokens", "2", *words]) == OK
    out, err = capsys.readouterr()
    return out, err


def test_conversation_beyond_the_positions_is_noted(
    work_dir: Path, monkeypatch: MonkeyPatch, capsys: Capture
):
    _, err = chat(monkeypatch, capsys, "w9\n" + "w9 " * 99 + "\n")
    notes = [line for line in err.splitlines() if "positions" in line]
    assert notes == ["the conversation has 106 tokens, and the model was made for 64 positions"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('No system!') if messages[0].role == 'system' }}" + TEMPLATE, "No system!"),
        (TEMPLATE.replace("in messages", "in messages if m.role != 'system'"), "does not show messages"),
    ],
    ids=["refused", "hidden"],
)  # fmt: skip
def test_system_that_a_template_does_not_take_is_an_error(
    work_dir: Path, capsys: Capture, template: str, message: str
):
    Path("tiny/chat_template.jinja").write_text(template)
    assert main(["generate", "tiny", "--chat", "--system", "w6"]) == 1
    assert message in capsys.readouterr().err


def test_stop_text_ends_a_continuation(work_dir: Path, capsys: Capture):
    words = ("generate", "tiny", "--prompt", "w3 w1", "--prompt", "w9", "--max-new-tokens", "9")
    report = run_json(capsys, *words)
    tokens = report["tokens"]
    first = [WORDS[token] for token in tokens[0]]
    stop = f" {first[2]} {first[3]}"
    stopped = run_json(capsys, *words, "--stop", stop)
    assert stopped["tokens"] == [tokens[0][:4], tokens[1]]
    assert stopped["ended"] == [True, False]
    assert stopped["texts"][0].endswith(stop)


def test_pipe_gives_turns_and_receives_answers(work_dir: Path):
    Path("turns.txt").write_text("w9\n\nw8\n/reset\nw9\n/exit\nw5\n")
    words = ("--chat", "--system", "w6", "--max-new-tokens", "4")
    process = run_python(PREP, "generate", "tiny", *words, has_jax=True, stdin="turns.txt")
    assert process.returncode == 0, process.stderr
    answers = process.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2], "after a reset, the same turn has the same answer"
    conversation = [{"role": "system", "content": "w6"}, {"role": "user", "content": "w9"}]
    conversations = [conversation]
    conversations.append(
        [
            *conversation,
            {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": "w8"},
        ]
    )
    expected = prep.generate("tiny", conversations=conversations, max_new_tokens=4)
    assert [(text or "").strip() for text in expected.texts] == [
        answer.strip() for answer in answers[:2]
    ]


def test_json_of_a_chat_has_its_messages(work_dir: Path, monkeypatch: MonkeyPatch, capsys: Capture):
    out, _ = chat(monkeypatch, capsys, "w9\n", "--json")
    report = json.loads(out)
    assert [message["role"] for message in report["messages"]] == ["user", "assistant"]
    assert report["tokens"] == 2


class Terminal:
    """The user's side of a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.shown = ""

    def read_until(self, text: str) -> str:
        """Return what the terminal shows up to a text."""
        end_s = time.monotonic() + MAX_S
        while text not in self.shown:
            assert time.monotonic() < end_s, f"no {text!r} in {self.shown!r}"
            if select.select([self.fd], [], [], 1)[0]:
                try:
                    self.shown += os.read(self.fd, 4096).decode()
                except OSError:
                    raise AssertionError(f"ended without {text!r}: {self.shown!r}") from None
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


@contextmanager
def chat_in_terminal(*words: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a chat in a pseudo-terminal, until the end of the block."""
    user, program = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, "generate", "tiny", "--chat", *words],
        stdin=program,
        stdout=program,
        stderr=program,
        start_new_session=True,
        env=environment,
    )
    os.close(program)
    try:
        yield Terminal(user), process
    finally:
        process.kill()
        process.wait()
        os.close(user)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", slow_except(["\x04", "/exit\n"], ["/exit\n"]), ids=["ctrl_d", "exit"]
)
def test_terminal_shows_a_conversation(work_dir: Path, end: str):
    with chat_in_terminal("--max-new-tokens", "4") as (terminal, process):
        terminal.read_until("/reset")
        terminal.read_until("> ")
        terminal.type("w9\n")
        answer = terminal.read_until("> ").splitlines()[-1].split()
        assert len(answer) == 4
        assert all(word in WORDS for word in answer)
        terminal.type(end)
        assert process.wait(MAX_S) == 0


def test_interrupt_stops_an_answer_and_not_the_chat(work_dir: Path):
    with chat_in_terminal("--max-new-tokens", "4000") as (terminal, process):
        terminal.read_until("> ")
        terminal.type("w9\n")
        terminal.read_until(" w")
        terminal.type("\x03")
        terminal.read_until("stopped")
        terminal.read_until("> ")
        terminal.type("/reset\n")
        terminal.read_until("starts again")
        terminal.read_until("> ")
        # Before it waits for a key, readline misses a Ctrl-C until the next key.
        wait_until_asleep(process.pid)
        terminal.type("\x03")
        terminal.read_until("/reset")
        wait_until_asleep(process.pid)
        terminal.type("\x03")
        assert process.wait(MAX_S) == 130


@pytest.mark.slow
def test_stop_signal_ends_a_chat(work_dir: Path):
    with chat_in_terminal("--max-new-tokens", "4000") as (terminal, process):
        terminal.read_until("> ")
        terminal.type("w9\n")
        terminal.read_until(" w")
        process.send_signal(signal.SIGTERM)
        assert process.wait(MAX_S) == 75


def test_chat_needs_a_template(work_dir: Path, capsys: Capture):
    Path("tiny/chat_template.jinja").unlink()
    assert main(["generate", "tiny", "--chat"]) == 1
    assert "has no chat template" in capsys.readouterr().err
