"""Conversations whose tokens an earlier version has made in another way, and their stores."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.corpus import EOS, change, make_config
from tests.helpers.token_stores import write_earlier_layout
from trainer.data.chat_template import ChatTemplate
from trainer.data.examples import IdentityChange
from trainer.data.files import hash_files
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig, store_identity
from trainer.data.tokenizer import load_tokenizer

BOS = 1
MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
TEMPLATE = ChatTemplate(
    "chat_template.jinja",
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% generation %}<|end|>{% endgeneration %}{% endfor %}",
    (("bos_token", "<|end|>"),),
)


def chat_config(folder: Path, suffix: str = ".jsonl", *, conversations: int = 9) -> TokenizeConfig:
    """Return settings of conversations in a file of a type."""
    path = folder / f"chats{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join([json.dumps({"messages": MESSAGES})] * conversations))
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"messages": [MESSAGES] * conversations}), path)
    config = make_config(folder, path, type="auto", fields="messages", bos_id=BOS)
    return change(config, chat_template=TEMPLATE, eos_id=EOS, add_eos=False, seq_length=4)


def recorded_identity(config: TokenizeConfig, *without: IdentityChange) -> str:
    """Return the identity of the tokens that a version without some changes makes."""
    files = hash_files([*map(Path, config.paths)], lambda line: None)
    typed = replace(
        config, type=Path(config.paths[0]).suffix.removeprefix(".").replace("jsonl", "json")
    )
    return store_identity(typed, files, load_tokenizer(config.tokenizer).digest, without=without)


def make_earlier_tokens(config: TokenizeConfig, *changes: IdentityChange) -> tuple[str, str]:
    """Make the tokens of a version without some changes. Return their identity, and the present one."""
    present = tokenize_files(config, progress=lambda *_: None, note=lambda line: None).identity
    identity = recorded_identity(config, *changes)
    shutil.copytree(config.cache / present, config.cache / identity)
    write_earlier_layout(config.cache / identity)
    meta = config.cache / identity / "meta.json"
    meta.write_text(meta.read_text().replace(present, identity))
    return identity, present
