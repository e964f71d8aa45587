"""Invalid lines: the first ones are reported with file and line, and one more than the limit is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.corpus import change, make_config
from trainer.data import chat_template
from trainer.data.chat_template import ChatTemplate
from trainer.data.store import MappedTokens
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig

GOOD = '{"text": "the cat sat on the mat"}'
LINES = [GOOD, "{", '{"body": "x"}', "", '{"text": 3}', GOOD, '{"text": "\\ud800"}', "[]", GOOD]
N_BAD = 5


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    return make_config(tmp_path, tmp_path / "a.jsonl", type="json", fields="text")


def tokenize(config: TokenizeConfig) -> tuple[MappedTokens, list[str]]:
    """Return the tokens and the notes."""
    notes: list[str] = []
    return tokenize_files(config, progress=lambda *counts: None, note=notes.append), notes


def test_bad_lines_up_to_the_limit_are_skipped_and_reported(config: TokenizeConfig, tmp_path: Path):
    tokens, notes = tokenize(change(config, bad_lines=N_BAD))
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n" * 3)
    expected, _ = tokenize(change(config, paths=(str(tmp_path / "good.jsonl"),)))
    assert tokens.ids[:].tolist() == expected.ids[:].tolist()
    path = tmp_path / "a.jsonl"
    assert [note.partition(" (")[0] for note in notes[:4]] == [
        f"skipped {path}:2: not JSON",
        f"skipped {path}:3: no column `text`",
        f"skipped {path}:5: column `text` is not text",
        f"{N_BAD} invalid lines skipped",
    ]


@pytest.mark.parametrize("limit", [0, 1, N_BAD - 1])
def test_one_bad_line_more_than_the_limit_is_an_error(
    config: TokenizeConfig, tmp_path: Path, limit: int
):
    with pytest.raises(PrepError) as caught:
        tokenize(change(config, bad_lines=limit))
    bad_numbers = [2, 3, 5, 7, 8]
    assert caught.value.what.startswith(f"{tmp_path}/a.jsonl:{bad_numbers[limit]}: ")
    noun = "line" if limit == 1 else "lines"
    assert caught.value.what.endswith(f", after {limit} invalid {noun}") == bool(limit)


def test_limit_is_part_of_the_identity(config: TokenizeConfig):
    tokens, _ = tokenize(change(config, bad_lines=N_BAD))
    again, notes = tokenize(change(config, bad_lines=N_BAD + 1))
    assert tokens.identity != again.identity
    assert not any("earlier run" in note for note in notes)
    with pytest.raises(PrepError):
        tokenize(config)


def test_invalid_utf8_in_a_line_can_be_skipped(config: TokenizeConfig, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"text": "\xff"}\n{"text": "x"}')
    _, notes = tokenize(change(config, bad_lines=1, seq_length=2))
    assert (
        notes[0]
        == f"skipped {tmp_path}/a.jsonl:2 is not UTF-8 (byte 45 is 0xff: invalid start byte)"
    )


SHOWN = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
REFUSED = f"{{% if messages[0].role == 'system' %}}{{{{ raise_exception('no system') }}}}{{% endif %}}{SHOWN}"
ENDLESS = REFUSED.replace(
    "{{ raise", "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2 + "{{ raise"
)
HUGE = REFUSED.replace("raise_exception('no system')", "'x' * 10**12")
N_REFUSED = 16


def bad_conversations(folder: Path, template: str, count: int) -> TokenizeConfig:
    """Return settings of conversations. A template refuses all but the last one."""
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    lines = [json.dumps({"messages": messages})] * count + [json.dumps({"messages": messages[1:]})]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    config = make_config(folder, folder / "chats.jsonl", type="json", fields="messages")
    chat = ChatTemplate("chat_template.jinja", template, ())
    return change(config, chat_template=chat, add_eos=False, seq_length=1, bad_lines=1000)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (ENDLESS, "it took more than 1 s of CPU time"),
        (HUGE, "it needs more than 512 MiB of memory"),
    ],
)
def test_records_beyond_a_limit_are_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, why: str
):
    monkeypatch.setattr(chat_template, "BASE_CPU_S", 1)
    with pytest.raises(PrepError) as caught:
        tokenize(bad_conversations(tmp_path, template, 1))
    what = "chat_template.jinja cannot render the messages"
    assert (caught.value.what, caught.value.why) == (what, why)


def test_other_refused_conversations_are_skipped(tmp_path: Path):
    _, notes = tokenize(bad_conversations(tmp_path, REFUSED, N_REFUSED))
    assert f"{N_REFUSED} invalid lines skipped" in notes
