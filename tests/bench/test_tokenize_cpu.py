"""`bench.tokenize_cpu`: each kind of documents has the text of the corpus."""

from __future__ import annotations

import json
from pathlib import Path

from bench.tokenize import CORPUS
from bench.tokenize_cpu import KINDS, write_kind

TEXT = "One. Two. Three. Four."


def test_kinds_have_the_text_of_the_corpus(tmp_path: Path):
    (tmp_path / CORPUS).write_text(json.dumps({"text": TEXT}) + "\n")
    contents: dict[str, str] = {}
    for name, kind in KINDS.items():
        write_kind(tmp_path, kind)
        contents[name] = (tmp_path / kind.file).read_text()
    assert contents["text"] == f"{TEXT}\n"
    assert json.loads(contents["web"]) == {"text": TEXT}
    assert len(contents["short"].splitlines()) == 2
    first_prompt = json.loads(contents["prompts"].splitlines()[0])
    assert first_prompt == {"question": "One", "text": "Two"}
