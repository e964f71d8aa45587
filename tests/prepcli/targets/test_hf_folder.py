"""The files of a model besides its weights."""

from __future__ import annotations

import json
from pathlib import Path

from prepcli.sources.side_files import SideFile
from prepcli.targets.hf_folder import copied_files, settings_files


def test_settings_have_config_and_extra_files(tmp_path: Path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    files = settings_files(
        {"vocab_size": 3, "é": "ü"},
        extra_files=copied_files([SideFile.at_top(tokenizer)], tmp_path, path_prefix="hf/"),
        path_prefix="hf/",
    )
    by_path = {file.path: file for file in files}
    assert by_path.keys() == {"hf/config.json", "hf/tokenizer.json"}
    assert json.loads(by_path["hf/config.json"].content) == {"vocab_size": 3, "é": "ü"}
    assert by_path["hf/tokenizer.json"].copied_from == str(tokenizer)
