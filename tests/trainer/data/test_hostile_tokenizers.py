"""Tokenizers that are not trusted: panics of the library, growing texts and special files are errors."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from prepcli.commands.cli.main import main
from prepcli.commands.operations.generate import read_prompts
from prepcli.core.errors import FAILED, PrepError
from prepcli.formats import tokenizer_files
from tests.helpers.slow_cases import slow_except
from trainer.data.tokenizer import load_tokenizer

BROKEN_MAP = base64.b64encode(b"\x10\0\0\0" + b"\xff" * 16 + b"abc").decode()


def replace_by(pattern: dict[str, str], content: str) -> dict[str, Any]:
    """Return a normalizer or decoder that replaces a pattern."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def write_parts(folder: Path, parts: dict[str, Any]) -> Path:
    """Write a tokenizer of three words with some other parts; return its file."""
    plain = json.loads(
        Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).to_str()
    )
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(plain | parts))
    return path


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[X]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}
PANICS = {
    "fixed length of 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "broken map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": BROKEN_MAP}},
    "backtracking": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}


@pytest.mark.parametrize("parts", PANICS.values(), ids=PANICS)
def test_panic_of_the_library_is_an_error(tmp_path: Path, parts: dict[str, Any]):
    path, text = write_parts(tmp_path, parts), "a" * 40 + "b"
    for call in ("encode", "encode_with_offsets"):
        with pytest.raises(PrepError, match=r"tokenizer.json cannot encode the data"):
            getattr(load_tokenizer(path), call)([text, text])
    with pytest.raises(PrepError, match=r"tokenizer.json cannot encode a prompt"):
        load_tokenizer(path).encode_prompt(text)


def test_unknown_token_of_a_template_is_an_error(tmp_path: Path):
    path = write_parts(tmp_path, {"post_processor": TEMPLATE})
    with pytest.raises(PrepError, match=r"cannot encode a prompt - .*no entry found"):
        load_tokenizer(path).encode_prompt("a")


def test_panic_of_a_decoder_is_an_error(tmp_path: Path):
    path = write_parts(
        tmp_path, {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 2**62}}
    )
    with pytest.raises(PrepError, match=r"tokenizer.json cannot decode"):
        load_tokenizer(path).decode([0, 1])


def test_interrupt_in_the_library_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = load_tokenizer(write_parts(tmp_path, {}))

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer.codec), "encode_prompt", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_prompt("a")


def charsmap(texts: bytes) -> dict[str, Any]:
    """Return a normalizer with a map that replaces `a` by the first text."""
    units = [0] * 256
    # `a` is 97. Its unit has the offset 3, so that its leaf is the unit 97 ^ 3 = 98, with the start of the text.
    units[97] = 3 << 10 | 1 << 8 | 97
    units[98] = 1 << 31
    data = struct.pack("<I256I", 4 * len(units), *units) + texts
    encoded = base64.b64encode(data).decode()
    return {"type": "Precompiled", "precompiled_charsmap": encoded}


LONG_MAP = charsmap(b"a" * 1000 + b"\0")
GROWTH = {
    "precompiled maps": {"type": "Sequence", "normalizers": [LONG_MAP, LONG_MAP]},
    "long replacement": replace_by({"String": "a"}, "x" * 1_000_000),
    "long replacement of a pattern": replace_by({"Regex": "."}, "x" * 1_000_000),
    "sequence": {
        "type": "Sequence",
        "normalizers": [replace_by({"String": "a"}, "aa") for _ in range(60)],
    },
    "nested sequences": {
        "type": "Sequence",
        "normalizers": [
            {
                "type": "Sequence",
                "normalizers": [replace_by({"String": "a"}, "aaaa") for _ in range(10)],
            }
            for _ in range(3)
        ],
    },
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the limits of memory and time a hundredth, or a second."""
    monkeypatch.setattr(tokenizer_files, "BASE_MEMORY_NBYTES", 200 << 20)
    monkeypatch.setattr(tokenizer_files, "CALL_CPU_S", 1)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", slow_except(GROWTH, ["precompiled maps"]))
def test_normalizer_that_grows_texts_is_an_error(tmp_path: Path, name: str):
    tokenizer = load_tokenizer(write_parts(tmp_path, {"normalizer": GROWTH[name]}))
    with pytest.raises(PrepError, match=r"it needs more than 2[0-9][0-9] MiB of memory"):
        tokenizer.encode(["a" * 100_000])
    with pytest.raises(PrepError, match=r"it needs more than 2[0-9][0-9] MiB of memory"):
        tokenizer.encode_prompt("a" * 100_000)
    # A new process encodes the next text.
    assert tokenizer.spelling(0) == "a"


def test_decoder_that_grows_texts_is_an_error(tmp_path: Path, small_limits: None):
    decoder = replace_by({"String": "a"}, "x" * 1_000_000)
    tokenizer = load_tokenizer(write_parts(tmp_path, {"decoder": decoder}))
    with pytest.raises(PrepError, match=r"it needs more than 2[0-9][0-9] MiB of memory"):
        tokenizer.decode([0] * 100_000)


def test_ordinary_normalizers_take_long_texts(tmp_path: Path):
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        replace_by({"String": " "}, "▁"),
        replace_by({"Regex": " {2,}"}, "▁"),
        {"type": "NFKC"},
        {"type": "Lowercase"},
    ]
    tokenizer = load_tokenizer(
        write_parts(tmp_path, {"normalizer": {"type": "Sequence", "normalizers": steps}})
    )
    (ids,) = tokenizer.encode(["a " * 2_000_000])
    assert ids.tolist() == [2]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_socket, link_to_zeros])
@pytest.mark.parametrize("tokenizer_name", ["tokenizer.model", "vocab.json"])
def test_settings_beside_a_tokenizer_are_regular_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, tokenizer_name: str
):
    # A socket's name has a length limit, so the path must be relative.
    monkeypatch.chdir(tmp_path)
    Path(tokenizer_name).write_text("{}")
    make(Path("tokenizer_config.json"))
    with pytest.raises(PrepError, match=r"tokenizer_config.json is not a file"):
        load_tokenizer(Path())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "its JSON is nested more than 100 levels"),
        ("{", "Expecting"),
        ("[]", "it is \\[\\]"),
    ],
)
def test_invalid_settings_of_a_sentencepiece_model_are_errors(tmp_path: Path, text: str, why: str):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(PrepError, match=f"tokenizer_config.json is not .* - {why}"):
        load_tokenizer(tmp_path)


def test_panic_ends_a_command_with_one_json_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("model"), LLAMA)
    write_parts(Path("model"), {"pre_tokenizer": {"type": "FixedLength", "length": 0}})
    assert main(["generate", "model", "--prompt", "a b", "--json"]) == FAILED
    result = json.loads(capsys.readouterr().out)
    assert result["error"]["what"] == "model/tokenizer.json cannot encode a prompt"


@pytest.mark.parametrize("make", [make_fifo, link_to_zeros, Path.mkdir])
def test_prompts_are_read_from_regular_files_only(tmp_path: Path, make: Any):
    make(tmp_path / "prompts.txt")
    with pytest.raises(PrepError, match="is not a file"):
        list(read_prompts(str(tmp_path / "prompts.txt")))


def test_ordinary_maps_take_long_texts(tmp_path: Path):
    """The map nmt_nfkc, which T5 and XLM-R use: U+FDFA of 3 bytes becomes 33 bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c", "b c a"]),
        model_writer=stream,
        vocab_size=8,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    model = model_pb2.ModelProto.FromString(stream.getvalue())
    encoded = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": encoded}
    tokenizer = load_tokenizer(write_parts(tmp_path, {"normalizer": normalizer}))
    (ids,) = tokenizer.encode(["\ufdfa" * 300_000])
    assert ids.tolist() == [2]
