"""`prep generate`: equal texts from all kinds of checkpoints, streams, chats, and errors for invalid prompts."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shlex
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
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer
from tests.helpers.waiting import MAX_S, wait_until_asleep
from trainer.generation import generator

PROMPT = "w3 w1 w4 w1 w5"
IDS = [3, 1, 4, 1, 5]


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Make a Hugging Face model `tiny` with a tokenizer in the current folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("tiny"), LLAMA, eos_token_id=None)
    write_tokenizer(Path("tiny"))
    return tmp_path


def generate_json(capsys: Capture, checkpoint: str, *words: str, new: int = 6) -> dict[str, Any]:
    report = run_json(capsys, "generate", checkpoint, "--max-new-tokens", str(new), *words)
    assert report["ok"], report
    return report


def test_all_checkpoint_kinds_generate_the_same_tokens(work_dir: Path, capsys: Capture):
    """A Hugging Face folder and its inits: unstacked, sharded and compressed, and stacked on axis 1."""
    run_ok("save-init", "tiny", "--out", "apart", "--no-scan")
    words = ("--mesh", "1,2,4", "--pad-vocab", "auto", "--compress", "zstd")
    run_ok("save-init", "tiny", "--out", "meshed", *words)
    expected = generate_json(capsys, "tiny", "--prompt", PROMPT)
    assert expected["prompts"] == [PROMPT]
    assert expected["prompt_tokens"] == [IDS]
    assert expected["texts"] == [" " + " ".join(WORDS[token] for token in expected["tokens"][0])]
    assert (expected["ended"], expected["dtype"]) == ([False], "float32")
    assert len(expected["tokens"][0]) == 6
    assert expected["tokens_per_s"] > 0
    run_ok("save-init", "tiny", "--out", "across", "--scan-axis", "1", "--rule", "embed=mp")
    for name in ("apart", "across"):
        assert generate_json(capsys, name, "--prompt", PROMPT)["tokens"] == expected["tokens"]
    report = generate_json(capsys, "meshed", "--prompt", PROMPT, "--mesh", "1,2,4")
    assert (report["mesh"], report["tokens"]) == ("1,2,4", expected["tokens"])
    # The vocabulary is padded while the model is read.
    report = generate_json(capsys, "tiny", "--prompt", PROMPT, "--mesh", "1,1,8", new=1)
    assert report["tokens"] == [expected["tokens"][0][:1]]


@pytest.mark.parametrize(
    "words", [["generate", "tiny", "--tokens", "1,2"], ["eval", "tiny", "--data", "text.txt"]]
)
def test_missing_platform_is_an_error_before_weights_are_read(
    work_dir: Path, capsys: Capture, monkeypatch: MonkeyPatch, words: list[str]
):
    import jax

    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'foo'")

    Path("text.txt").write_text("w1 w2 w3 " * 100)
    monkeypatch.setattr(jax, "local_devices", fail)
    lines = error_lines(capsys, *words)
    assert lines[:2] == ["error: JAX found no devices", "  why: Unable to initialize backend 'foo'"]


def test_generate_reads_stdin_and_prints_texts_only(work_dir: Path):
    """Stdout has one line per prompt, from stdin and from options."""
    Path("prompts.txt").write_text(f"{PROMPT}\n\nw9 w2\n")
    words = ("--prompts", "-", "--tokens", "3,1,4,1,5", "--prompt", "w9", "--max-new-tokens", "3")
    process = run_python(PREP, "generate", "tiny", *words, has_jax=True, stdin="prompts.txt")
    assert process.returncode == OK, process.stderr
    lines = process.stdout.splitlines()
    assert [len(line.split()) for line in lines] == [3, 3, 3, 3]
    assert lines[1] == lines[3], "the same prompt, as a text and as ids"
    assert process.stderr.startswith("tiny  llama  ")
    assert "\nloading the parameters\ncompiling for the first prompts\n" in process.stderr
    assert "12 tokens for 4 prompts in " in process.stderr


def test_prompts_are_read_from_text_jsonl_and_stdin(
    work_dir: Path, monkeypatch: MonkeyPatch, capsys: Capture
):
    Path("p.jsonl").write_text('{"prompt": "w1 w2"}\n\n{"text": "w3", "other": 1}\n')
    # A byte order mark, and line ends of Windows
    data = "\ufeffw1 w2\r\n\r\nw3\r\n".encode()
    Path("p.txt").write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    reports = [
        generate_json(capsys, "tiny", "--prompts", name, new=1)
        for name in ("p.jsonl", "p.txt", "-")
    ]
    for report in reports:
        assert report["prompts"] == ["w1 w2", "w3"]
        assert report["tokens"] == reports[0]["tokens"]


def test_new_tokens_default_to_learned_positions(work_dir: Path, capsys: Capture):
    make_checkpoint(Path("neo"), GPT_NEO, max_position_embeddings=9, eos_token_id=None)
    assert len(run_json(capsys, "generate", "neo", "--tokens", "1,2,3")["tokens"][0]) == 7
    for count in (5, 12):
        ids = ",".join("1" * count)
        lines = error_lines(capsys, "generate", "neo", "--tokens", ids, "--max-new-tokens", "6")
        assert lines[1:] == [
            "  why: the model has 9 positions",
            f" hint: {'`--max-new-tokens 5`' if count == 5 else 'use a shorter prompt'}",
        ]


def test_generate_prints_ids_without_tokenizer(work_dir: Path, capsys: Capture):
    Path("tiny/tokenizer.json").rename("words.json")
    report = generate_json(capsys, "tiny", "--tokens", "3, 1,4,1,5", new=1)
    assert (report["prompts"], report["texts"], report["prompt_tokens"]) == ([None], None, [IDS])
    run_ok("generate", "tiny", "--tokens", "3,1,4,1,5", "--max-new-tokens", "1")
    assert capsys.readouterr().out == ",".join(map(str, report["tokens"][0])) + "\n"
    words = ("--prompt", PROMPT, "--tokenizer", "words.json")
    assert generate_json(capsys, "tiny", *words, new=1)["tokens"] == report["tokens"]
    lines = error_lines(capsys, "generate", "tiny", "--prompt", PROMPT)
    assert lines[0] == "error: tiny has no tokenizer"
    assert lines[2] == " hint: `--tokenizer PATH`, or `--tokens 1,2,3`"


def test_generation_stops_at_eos_token(work_dir: Path, capsys: Capture):
    """The end token is in config.json, or in generation_config.json."""
    tokens = generate_json(capsys, "tiny", "--prompt", PROMPT)["tokens"][0]
    first_indices = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
    for file, end_index, other_end_ids in (
        ("config.json", first_indices[-1], []),
        ("generation_config.json", first_indices[1], [130]),
    ):
        ends = [*other_end_ids, tokens[end_index]] if other_end_ids else tokens[end_index]
        path = Path("tiny", file)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
        report = generate_json(capsys, "tiny", "--prompt", PROMPT)
        assert (report["tokens"][0], report["ended"]) == (tokens[: end_index + 1], [True])


def test_invalid_eos_token_ids_are_ignored(work_dir: Path, capsys: Capture):
    for ends in ([131, -1], 10**12, True, "2", None):
        Path("tiny/generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        report = generate_json(capsys, "tiny", "--prompt", PROMPT, new=2)
        assert (len(report["tokens"][0]), report["ended"]) == (2, [False])


def test_bfloat16_checkpoint_computes_in_bfloat16(work_dir: Path, capsys: Capture):
    make_checkpoint(Path("half"), LLAMA, "bfloat16")
    assert generate_json(capsys, "half", "--tokens", "1,2", new=1)["dtype"] == "bfloat16"


def test_encoder_decoder_generates_from_prompts(work_dir: Path, capsys: Capture):
    make_checkpoint(Path("t5"), FAMILY_CONFIGS["t5"], eos_token_id=None)
    write_tokenizer(Path("t5"))
    report = generate_json(capsys, "t5", "--prompt", PROMPT, "--prompt", "w7")
    assert report["prompt_tokens"] == [IDS, [7]]
    assert report["texts"] == [
        " ".join(WORDS[token] for token in tokens) for tokens in report["tokens"]
    ]
    assert [len(tokens) for tokens in report["tokens"]] == [6, 6]
    config = FAMILY_CONFIGS["t5"]
    headless = {key: config[key] for key in config if not key.startswith(("dec", "pad"))}
    make_checkpoint(Path("headless"), headless)
    lines = error_lines(capsys, "generate", "headless", "--tokens", "1")
    assert "no valid decoder_start_token_id" in lines[0]


# Words after `prep generate tiny`, the error, and the exit code
INVALID_PROMPTS = [
    ("", "no prompt was given", 2),
    ("--tokens 1,x", "invalid `--tokens 1,x`", 2),
    (f"--tokens {'9' * 5000}", "invalid `--tokens", 2),
    ("--tokens 99999999999", "invalid `--tokens", 2),
    ("--tokens 1 --max-new-tokens 999999999999", "new tokens are too many", 2),
    ("--tokens ''", "`--tokens` is empty", 2),
    ("--prompt ''", "empty prompt", 2),
    ("--tokens 131", "token id 131 is out of range", 2),
    ("--prompts none.txt", "cannot read or write none.txt", 1),
    ("--prompts bad.jsonl", "line 1 of bad.jsonl is not valid JSON", 1),
    ("--prompts other.jsonl", "line 2 of other.jsonl has no prompt", 1),
    ("--prompts bytes.txt", "bytes.txt is not UTF-8 text", 1),
    ("--prompt w1 --stop \udcff", "`--stop` is not UTF-8 text", 2),
    ("--prompt w1 --temperature 1 --top-p 1.5", "top_p 1.5 is out of range", 2),
    ("--prompt w1 --temperature 1 --top-k -1", "top_k -1 is out of range", 2),
    ("--prompt w1 --temperature -1", "temperature -1 is out of range", 2),
    ("--prompt w1 --mesh 1,1,3", "mesh 1,1,3", 2),
    ("--prompt w1 --mesh sp:8", "`--mesh dp:1,fsdp:1,mp:1,sp:8` splits tokens over sp", 2),
    ("--prompt w1 --tokenizer none", "no tokenizer at none", 1),
]


def test_invalid_prompts_and_options_are_errors(work_dir: Path, capsys: Capture):
    Path("bad.jsonl").write_text("w1 w2\n")
    Path("other.jsonl").write_text('{"prompt": "w1"}\n{"prompt": 3}\n')
    Path("bytes.txt").write_bytes(b"\xff\xfe\n")
    for words, message, code in INVALID_PROMPTS:
        assert main(["generate", "tiny", *shlex.split(words), "-q"]) == code
        out, err = capsys.readouterr()
        assert (out, message in err) == ("", True), err
        assert "--set" not in err, "what it hints at is an option of this command"
        assert "bug in prep" not in err


def test_mesh_must_divide_the_heads(work_dir: Path, capsys: Capture):
    make_checkpoint(Path("odd"), LLAMA, num_attention_heads=2, num_key_value_heads=2)
    lines = error_lines(capsys, "generate", "odd", "--tokens", "1", "--mesh", "1,1,8")
    assert "heads" in lines[0]


def test_prompt_ids_ignore_broken_tokenizer(work_dir: Path, capsys: Capture):
    for path in Path("tiny").rglob("tokenizer.json"):
        path.write_text("{")
    assert main(["generate", "tiny", "--tokens", "1", "--max-new-tokens", "1", "-q"]) == 0
    assert capsys.readouterr().out.strip().isdecimal()
    assert main(["generate", "tiny", "--prompt", "w1", "-q"]) == 1


def test_doubtful_inputs_are_noted(work_dir: Path, capsys: Capture):
    Path("other").mkdir()
    tokenizer = json.loads(Path("tiny/tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(list(tokenizer["model"]["vocab"].items())[:20])
    Path("other/tokenizer.json").write_text(json.dumps(tokenizer))
    words = ["--tokenizer", "other", "--max-new-tokens", "1", "--prompt"]
    assert main(["generate", "tiny", *words, WORDS[3]]) == OK
    error = capsys.readouterr().err
    assert "other/tokenizer.json has ids up to 19, and the model's vocabulary 131 tokens" in error
    assert "1 token for 1 prompt in" in error
    assert "positions" not in error
    assert main(["generate", "tiny", *words, " ".join([WORDS[3]] * 64)]) == OK
    error = capsys.readouterr().err
    assert "may have 65 tokens, and the model was made for 64 positions" in error


# Generation that shows tokens while they are decoded, on a terminal and through the public API


NEW_TOKENS = ("--max-new-tokens", "6")


class Terminal(io.StringIO):
    """A terminal that records its writes, and is interrupted after a number of them."""

    def __init__(self, interrupt_after: int = 1000) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.interrupt_after = interrupt_after

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(self.writes) == self.interrupt_after:
            self.interrupt_after = -1
            raise KeyboardInterrupt
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def stream_dir(work_dir: Path, monkeypatch: MonkeyPatch) -> Path:
    """Add a T5 model `t5` with a tokenizer, and decode one step at a time."""
    make_checkpoint(Path("t5"), FAMILY_CONFIGS["t5"], eos_token_id=None)
    write_tokenizer(Path("t5"))
    monkeypatch.setattr(generator, "MAX_STREAM_DELAY_S", 0)
    return work_dir


def open_terminal(monkeypatch: MonkeyPatch, **options: int) -> Terminal:
    """Replace stdout by a terminal."""
    terminal = Terminal(**options)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


@pytest.mark.parametrize("name", slow_except(["tiny", "t5"], ["tiny"]))
def test_one_prompt_streams_to_a_terminal(
    name: str, stream_dir: Path, capsys: Capture, monkeypatch: MonkeyPatch
):
    (text,) = run_json(capsys, "generate", name, "--prompt", "w3 w1", *NEW_TOKENS)["texts"]
    terminal = open_terminal(monkeypatch)
    assert main(["generate", name, "--prompt", "w3 w1", *NEW_TOKENS]) == 0
    assert terminal.getvalue() == text + "\n"
    assert [piece for piece in terminal.writes if piece.strip()] == [
        piece if index == 0 and name == "t5" else f" {piece}"
        for index, piece in enumerate(text.split())
    ]


def test_token_ids_stream_without_tokenizer(stream_dir: Path, monkeypatch: MonkeyPatch):
    Path("tiny/tokenizer.json").unlink()
    terminal = open_terminal(monkeypatch)
    assert main(["generate", "tiny", "--tokens", "3,1", *NEW_TOKENS]) == 0
    assert len(terminal.writes) > 6
    assert len(terminal.getvalue().strip().split(",")) == 6
    received: list[prep.NewTokens] = []
    result = prep.generate("tiny", tokens=[[3, 1]], max_new_tokens=6, on_tokens=received.append)
    assert result.texts == (None,)
    assert "".join(new.text for new in received) == ",".join(map(str, result.tokens[0]))


def test_interrupt_keeps_printed_text(stream_dir: Path, monkeypatch: MonkeyPatch):
    terminal = open_terminal(monkeypatch, interrupt_after=3)
    assert main(["generate", "tiny", "--prompt", "w3 w1", *NEW_TOKENS]) == 130
    assert terminal.getvalue() == "".join(terminal.writes)
    assert terminal.getvalue().endswith("\n")
    assert len(terminal.getvalue().split()) == 3


def test_api_passes_on_new_tokens_of_each_prompt(stream_dir: Path):
    received: list[prep.NewTokens] = []
    prompts = ["w3 w1", "w5", "w1 w1"]
    result = prep.generate(
        "tiny", prompts, max_new_tokens=5, batch_size=2, on_tokens=received.append
    )
    assert result.tokens == prep.generate("tiny", prompts, max_new_tokens=5, batch_size=2).tokens
    for prompt, (text, tokens) in enumerate(zip(result.texts, result.tokens)):
        parts = [new for new in received if new.prompt == prompt]
        assert "".join(part.text for part in parts) == text
        assert tuple(token for part in parts for token in part.tokens) == tokens
        assert len(parts) == 5


# `prep generate --chat` in a pseudo-terminal and in a pipe, and prompts that are conversations


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
def chat_dir(work_dir: Path) -> Path:
    """Add a chat template, and a list of tools."""
    Path("tiny/chat_template.jinja").write_text(TEMPLATE)
    Path("tools.json").write_text(json.dumps([TOOL]))
    return work_dir


def prompt_texts(capsys: Capture, *words: str) -> list[str]:
    """Return the prompts of a command as the template renders them."""
    report = run_json(capsys, "generate", "tiny", "--max-new-tokens", "3", *words)
    assert report["ok"], report
    for text, ids in zip(report["prompts"], report["prompt_tokens"], strict=True):
        assert " ".join(WORDS[token] for token in ids) == text
    return report["prompts"]


def test_prompts_file_has_conversations(chat_dir: Path, capsys: Capture):
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
    result = prep.generate(
        "tiny", conversations=[rows[0]["messages"]], template_args={"flag": True}, max_new_tokens=3
    )
    assert result.prompts == ("w2 w9 w3 w5",)


# Words after `prep generate tiny`, and the error
INVALID_CHATS = [
    ("--prompt w1 --system w2", "`--system` has no effect without `--chat`"),
    ("--chat --prompt w1", "`--chat` takes no prompts"),
    ("--prompt w1 --tools tools.json", "`--tools` has no effect"),
    ("--chat --template-args [1]", "`--template-args` is not a JSON object"),
    ("--chat --template-args {", "`--template-args` is not JSON"),
    ("--prompt w1 --stop ''", "`--stop` is empty"),
    ("--chat --template-args '{\"messages\": 1}'", "`messages` is not a variable"),
]


def test_invalid_options_of_chats_are_errors(chat_dir: Path, capsys: Capture):
    for words, message in INVALID_CHATS:
        lines = error_lines(capsys, "generate", "tiny", *shlex.split(words))
        assert lines[0].startswith(f"error: {message}")


@pytest.mark.parametrize("words", [["--prompt", "w9 \udcff"], ["--chat", "--system", "w6 \udcff"]])
def test_text_must_be_utf8(chat_dir: Path, capsys: Capture, words: list[str]):
    (line, why, hint) = error_lines(capsys, "generate", "tiny", *words)
    assert line.endswith(" is not UTF-8 text")
    assert "surrogate" in why
    assert "convert it to UTF-8" in hint


def chat(monkeypatch: MonkeyPatch, capsys: Capture, turns: str, *words: str) -> tuple[str, str]:
    """Answer turns of a pipe in this process, and return stdout and stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    capsys.readouterr()
    assert main(["generate", "tiny", "--chat", "--max-new-tokens", "2", *words]) == OK
    out, err = capsys.readouterr()
    return out, err


def test_conversation_beyond_the_positions_is_noted(
    chat_dir: Path, monkeypatch: MonkeyPatch, capsys: Capture
):
    _, err = chat(monkeypatch, capsys, "w9\n" + "w9 " * 99 + "\n")
    notes = [line for line in err.splitlines() if "positions" in line]
    assert notes == ["the conversation has 106 tokens, and the model was made for 64 positions"]


REFUSING = "{{ raise_exception('No system!') if messages[0].role == 'system' }}"
# Chat template, and the error for a system text
TEMPLATES = {
    "refused": (REFUSING + TEMPLATE, "No system!"),
    "hidden": (
        TEMPLATE.replace("in messages", "in messages if m.role != 'system'"),
        "does not show",
    ),
    "missing": (None, "has no chat template"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_system_that_a_template_does_not_take_is_an_error(
    chat_dir: Path, capsys: Capture, name: str
):
    template, message = TEMPLATES[name]
    path = Path("tiny/chat_template.jinja")
    if template is None:
        path.unlink()
    else:
        path.write_text(template)
    assert message in run_failing(capsys, 1, "generate", "tiny", "--chat", "--system", "w6")


def test_stop_text_ends_a_continuation(chat_dir: Path, capsys: Capture):
    words = ("generate", "tiny", "--prompt", "w3 w1", "--prompt", "w9", "--max-new-tokens", "6")
    report = run_json(capsys, *words)
    tokens = report["tokens"]
    first = [WORDS[token] for token in tokens[0]]
    stop = f" {first[2]} {first[3]}"
    stopped = run_json(capsys, *words, "--stop", stop)
    assert stopped["tokens"] == [tokens[0][:4], tokens[1]]
    assert stopped["ended"] == [True, False]
    assert stopped["texts"][0].endswith(stop)


def test_pipe_gives_turns_and_receives_answers(chat_dir: Path):
    Path("turns.txt").write_text("w9\n\nw8\n/reset\nw9\n/exit\nw5\n")
    words = ("--chat", "--system", "w6", "--max-new-tokens", "4")
    process = run_python(PREP, "generate", "tiny", *words, has_jax=True, stdin="turns.txt")
    assert process.returncode == 0, process.stderr
    answers = process.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2], "after a reset, the same turn has the same answer"
    conversation = [{"role": "system", "content": "w6"}, {"role": "user", "content": "w9"}]
    answer = {"role": "assistant", "content": answers[0]}
    conversations = [conversation, [*conversation, answer, {"role": "user", "content": "w8"}]]
    expected = prep.generate("tiny", conversations=conversations, max_new_tokens=4)
    assert [(text or "").strip() for text in expected.texts] == [
        answer.strip() for answer in answers[:2]
    ]


def test_json_of_a_chat_has_its_messages(chat_dir: Path, monkeypatch: MonkeyPatch, capsys: Capture):
    out, _ = chat(monkeypatch, capsys, "w9\n", "--json")
    report = json.loads(out)
    assert [message["role"] for message in report["messages"]] == ["user", "assistant"]
    assert report["tokens"] == 2


class PseudoTerminal:
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
def chat_in_terminal(*words: str) -> Iterator[tuple[PseudoTerminal, subprocess.Popen[bytes]]]:
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
        yield PseudoTerminal(user), process
    finally:
        process.kill()
        process.wait()
        os.close(user)


def test_interrupt_stops_an_answer_and_not_the_chat(chat_dir: Path):
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
def test_stop_signal_ends_a_chat(chat_dir: Path):
    with chat_in_terminal("--max-new-tokens", "4000") as (terminal, process):
        terminal.read_until("> ")
        terminal.type("w9\n")
        terminal.read_until(" w")
        process.send_signal(signal.SIGTERM)
        assert process.wait(MAX_S) == 75
