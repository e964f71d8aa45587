"""`prep generate`: equal texts from all kinds of checkpoints, streamed, with errors for invalid prompts."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.generate import read_prompts
from prepcli.core.errors import OK
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer
from trainer.generation import generator

PROMPT = "w3 w1 w4 w1 w5"
IDS = [3, 1, 4, 1, 5]


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Make a Hugging Face model `tiny` with a tokenizer in the current folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("tiny"), LLAMA)
    write_tokenizer(Path("tiny"))
    return tmp_path


def generate_json(capsys: Capture, checkpoint: str, *words: str, new: int = 6) -> dict[str, Any]:
    report = run_json(capsys, "generate", checkpoint, "--max-new-tokens", str(new), *words)
    assert report["ok"], report
    return report


def test_all_checkpoint_kinds_generate_the_same_tokens(work_dir: Path, capsys: Capture):
    """A Hugging Face folder and its inits: unstacked, sharded and compressed, and stacked on axis 1."""
    run_ok("save-init", "tiny", "--out", "apart", "--no-scan")
    run_ok(
        "save-init",
        "tiny",
        "--out",
        "meshed",
        "--mesh",
        "1,2,4",
        "--pad-vocab",
        "auto",
        "--compress",
        "zstd",
    )
    expected = generate_json(capsys, "tiny", "--prompt", PROMPT)
    assert expected["prompts"] == [PROMPT]
    assert expected["prompt_tokens"] == [IDS]
    assert expected["texts"] == [" " + " ".join(WORDS[token] for token in expected["tokens"][0])]
    assert (len(expected["tokens"][0]), expected["ended"], expected["dtype"]) == (
        6,
        [False],
        "float32",
    )
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


@pytest.mark.slow
def test_generate_reads_any_step_of_a_run(work_dir: Path, capsys: Capture):
    Path("text.txt").write_text(" ".join(WORDS[number] for number in 1 + np.arange(2000) % 7))
    Path("r.toml").write_text(
        'mesh = "1,2,4"\n[model]\npath = "tiny"\n[data]\ntype = "text"\npath = "text.txt"\nseq_length = 16\n'
        "[batch]\nsize = 8\n[optimizer]\nlr = 3e-2\nwarmup_steps = 1\n[train]\nsteps = 40\n[checkpoint]\nevery = 20\n"
    )
    run_ok("train", "r.toml")
    learned = generate_json(capsys, "runs/r", "--prompt", "w3 w4 w5")
    assert learned["texts"] == [" w6 w7 w1 w2 w3 w4"], "it goes on as its texts do"
    assert generate_json(capsys, "runs/r", "--step", "20", "--prompt", "w3 w4 w5", new=1)["ok"]
    assert (
        error_lines(capsys, "generate", "runs/r", "--step", "3", "--prompt", "w3")[0]
        == "error: runs/r has no step 3"
    )


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


def test_prompts_are_read_from_text_and_jsonl(work_dir: Path, capsys: Capture):
    Path("p.jsonl").write_text('{"prompt": "w1 w2"}\n\n{"text": "w3", "other": 1}\n')
    Path("p.txt").write_bytes(b"\xef\xbb\xbfw1 w2\nw3\n")  # with a byte order mark
    reports = [
        generate_json(capsys, "tiny", "--prompts", name, new=1) for name in ("p.jsonl", "p.txt")
    ]
    assert reports[0]["prompts"] == reports[1]["prompts"] == ["w1 w2", "w3"]
    assert reports[0]["tokens"] == reports[1]["tokens"]


# By default test_sampled_tokens_do_not_depend_on_batch compares batches of a generator.
@pytest.mark.slow
def test_batch_size_does_not_change_tokens(work_dir: Path, capsys: Capture):
    words = [
        "--tokens",
        "1",
        "--tokens",
        "2,3",
        "--tokens",
        "4,5,6",
        "--temperature",
        "1.5",
        "--top-k",
        "50",
        "--seed",
        "3",
    ]
    reports = [
        generate_json(capsys, "tiny", *words, "--batch-size", size, new=3) for size in ("16", "2")
    ]
    assert reports[0]["tokens"] == reports[1]["tokens"]
    other_seed_report = generate_json(capsys, "tiny", *words[:-1], "4", new=1)
    assert other_seed_report["tokens"] != [tokens[:1] for tokens in reports[0]["tokens"]], (
        "another seed"
    )


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
    assert (
        generate_json(capsys, "tiny", "--prompt", PROMPT, "--tokenizer", "words.json", new=1)[
            "tokens"
        ]
        == report["tokens"]
    )
    lines = error_lines(capsys, "generate", "tiny", "--prompt", PROMPT)
    assert lines[0] == "error: tiny has no tokenizer"
    assert lines[2] == " hint: `--tokenizer PATH`, or `--tokens 1,2,3`"


def test_generation_stops_at_eos_token(work_dir: Path, capsys: Capture):
    """The end token is in config.json, or in generation_config.json."""
    tokens = generate_json(capsys, "tiny", "--prompt", PROMPT, new=12)["tokens"][0]
    first_indices = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
    for file, end_index, other_end_ids in (
        ("config.json", first_indices[-1], []),
        ("generation_config.json", first_indices[1], [130]),
    ):
        ends = [*other_end_ids, tokens[end_index]] if other_end_ids else tokens[end_index]
        path = Path("tiny", file)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
        report = generate_json(capsys, "tiny", "--prompt", PROMPT, new=12)
        assert (report["tokens"][0], report["ended"]) == (tokens[: end_index + 1], [True])


@pytest.mark.parametrize("ends", [[131, -1], 10**12, True, "2", None])
def test_invalid_eos_token_ids_are_ignored(work_dir: Path, capsys: Capture, ends: object):
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
    run_ok("save-init", "t5", "--out", "t5-init")
    again = generate_json(capsys, "t5-init", "--prompt", PROMPT, "--prompt", "w7", new=1)
    assert again["tokens"] == [tokens[:1] for tokens in report["tokens"]]
    make_checkpoint(
        Path("headless"),
        {
            key: value
            for key, value in FAMILY_CONFIGS["t5"].items()
            if not key.startswith(("dec", "pad"))
        },
    )
    assert (
        "no valid decoder_start_token_id"
        in error_lines(capsys, "generate", "headless", "--tokens", "1")[0]
    )


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "stdin"])
def test_prompts_may_have_line_ends_of_windows(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool
):
    data = "\ufeffw1 w2\r\n\r\nw3\r\n".encode()
    Path("prompts.txt").write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    assert [*read_prompts("prompts.txt" if is_file else "-")] == ["w1 w2", "w3"]


INVALID_PROMPTS: dict[str, tuple[Sequence[str], str, int]] = {
    "nothing": ((), "no prompt was given", 2),
    "no ids": (("--tokens", "1,x"), "invalid `--tokens 1,x`", 2),
    "digits without end": (("--tokens", "9" * 5000), "invalid `--tokens", 2),
    "an id that no vocabulary has": (("--tokens", "99999999999"), "invalid `--tokens", 2),
    "tokens without end": (
        ("--tokens", "1", "--max-new-tokens", "999999999999"),
        "new tokens are too many",
        2,
    ),
    "empty ids": (("--tokens", ""), "`--tokens` is empty", 2),
    "an empty text": (("--prompt", ""), "empty prompt", 2),
    "an id too large": (("--tokens", "131"), "token id 131 is out of range", 2),
    "no file": (("--prompts", "none.txt"), "cannot read or write none.txt", 1),
    "no JSON": (("--prompts", "bad.jsonl"), "line 1 of bad.jsonl is not valid JSON", 1),
    "no prompt in it": (("--prompts", "other.jsonl"), "line 2 of other.jsonl has no prompt", 1),
    "no text": (("--prompts", "bytes.txt"), "bytes.txt is not UTF-8 text", 1),
    "no text to stop at": (
        ("--prompt", "w1", "--stop", "\udcff"),
        "`--stop` is not UTF-8 text",
        2,
    ),
    "top-p": (
        ("--prompt", "w1", "--temperature", "1", "--top-p", "1.5"),
        "top_p 1.5 is out of range",
        2,
    ),
    "top-k": (
        ("--prompt", "w1", "--temperature", "1", "--top-k", "-1"),
        "top_k -1 is out of range",
        2,
    ),
    "temperature": (("--prompt", "w1", "--temperature", "-1"), "temperature -1 is out of range", 2),
    "mesh": (("--prompt", "w1", "--mesh", "1,1,3"), "mesh 1,1,3", 2),
    "sp": (
        ("--prompt", "w1", "--mesh", "sp:8"),
        "`--mesh dp:1,fsdp:1,mp:1,sp:8` splits tokens over sp",
        2,
    ),
    "tokenizer": (("--prompt", "w1", "--tokenizer", "none"), "no tokenizer at none", 1),
}


@pytest.mark.parametrize("why", INVALID_PROMPTS)
def test_invalid_prompts_and_options_are_errors(work_dir: Path, capsys: Capture, why: str):
    Path("bad.jsonl").write_text("w1 w2\n")
    Path("other.jsonl").write_text('{"prompt": "w1"}\n{"prompt": 3}\n')
    Path("bytes.txt").write_bytes(b"\xff\xfe\n")
    words, message, code = INVALID_PROMPTS[why]
    assert main(["generate", "tiny", *words, "-q"]) == code
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


NEW_TOKENS = ("--max-new-tokens", "9")


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
def stream_dir(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Make the Hugging Face models `tiny` and `t5` with a tokenizer in the current folder."""
    make_checkpoint(Path("tiny"), LLAMA)
    make_checkpoint(Path("t5"), FAMILY_CONFIGS["t5"], eos_token_id=None)
    for name in ("tiny", "t5"):
        write_tokenizer(Path(name))
    monkeypatch.setattr(generator, "MAX_STREAM_DELAY_S", 0)  # one step at a time
    return tmp_path


def open_terminal(monkeypatch: MonkeyPatch, **options: int) -> Terminal:
    """Replace stdout by a terminal."""
    terminal = Terminal(**options)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


@pytest.mark.parametrize(
    ("name", "prompt"), slow_except([("tiny", "w3 w1"), ("t5", "w3 w1")], [("tiny", "w3 w1")])
)
def test_one_prompt_streams_to_a_terminal(
    name: str, prompt: str, stream_dir: Path, capsys: Capture, monkeypatch: MonkeyPatch
):
    (text,) = run_json(capsys, "generate", name, "--prompt", prompt, *NEW_TOKENS)["texts"]
    terminal = open_terminal(monkeypatch)
    assert main(["generate", name, "--prompt", prompt, *NEW_TOKENS]) == 0
    assert terminal.getvalue() == text + "\n"
    assert [piece for piece in terminal.writes if piece.strip()] == [
        piece if index == 0 and name == "t5" else f" {piece}"
        for index, piece in enumerate(text.split())
    ]


def test_token_ids_stream_without_tokenizer(stream_dir: Path, monkeypatch: MonkeyPatch):
    Path("tiny/tokenizer.json").unlink()
    terminal = open_terminal(monkeypatch)
    assert main(["generate", "tiny", "--tokens", "3,1", *NEW_TOKENS]) == 0
    assert len(terminal.writes) > 9
    assert len(terminal.getvalue().strip().split(",")) == 9


def test_several_prompts_print_one_line_each(stream_dir: Path, monkeypatch: MonkeyPatch):
    terminal = open_terminal(monkeypatch)
    assert main(["generate", "tiny", "--prompt", "w3", "--prompt", "w1", *NEW_TOKENS]) == 0
    assert len(terminal.getvalue().splitlines()) == 2


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


def test_api_returns_no_texts_without_tokenizer(stream_dir: Path):
    Path("tiny/tokenizer.json").unlink()
    received: list[prep.NewTokens] = []
    result = prep.generate("tiny", tokens=[[3, 1]], max_new_tokens=2, on_tokens=received.append)
    assert result.texts == (None,)
    assert "".join(new.text for new in received) == ",".join(map(str, result.tokens[0]))
