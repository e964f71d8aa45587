"""Errors and warnings of the public functions name Python arguments instead of command-line options."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepcli as prep
from prepcli.console.observer import Observer
from prepcli.operations import conversion
from prepcli.operations.arguments import annotations_of
from prepcli.operations.caller_terms import to_callers_terms
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`--overwrite`", "`overwrite=True`"),
        ("`--out NAME` or `--overwrite`", '`out="NAME"` or `overwrite=True`'),
        ("`--out` on another disk", "`out` on another disk"),
        ("`--no-scan` writes one leaf per layer", "`scan=False` writes one leaf per layer"),
        ("`--memory 512MiB` or more", '`memory="512MiB"` or more'),
        ("`--rule 'kv_heads=mp|none'` to keep it", '`rules="kv_heads=mp|none"` to keep it'),
        ("cast it: --dtype bfloat16", 'cast it: dtype="bfloat16"'),
        ("only one of --seed, --mesh", "only one of seed, mesh"),
        ("`--true-vocab 5`", "`true_vocab=5`"),
        ("`prep pad-vocab m --multiple 4` (to 260)", '`prep.pad_vocab("m", multiple=4)` (to 260)'),
        ("`prep export` removes padding", "`prep.export` removes padding"),
        ("`prep verify a b`", '`prep.verify("a", "b")`'),
        ("`prep inspect m 'a.b' --stats`", "`prep inspect m 'a.b' --stats`"),
        ("`hf download m --force-download`", "`hf download m --force-download`"),
        ("`--scan-axis 1`", "`scan_axis=1`"),
        ("`prep export m --out x`", '`prep.export("m", out="x")`'),
        ("or `--multiple 8`", "or `multiple=8` of `prep.pad_vocab`"),
        ("`--workers 2` and it's", "`--workers 2` and it's"),
        ("`don't --out`", "`don't --out`"),
    ],
)
def test_options_become_arguments(text: str, expected: str):
    assert to_callers_terms(text, annotations_of(prep.save_init)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pass `--no-verify`", "pass `verify=False`"),
        ("`--prompt TEXT`, or `--tokens 1,2,3`", '`prompts="TEXT"`, or `tokens=[[1, 2, 3]]`'),
        ("`--max-new-tokens 64`", "`max_new_tokens=64`"),
        ("`--dtype bfloat16`, or `--mesh`", '`dtype="bfloat16"`, or `mesh`'),
    ],
)
def test_options_of_generate_become_arguments(text: str, expected: str):
    assert to_callers_terms(text, annotations_of(prep.generate)) == expected


def test_set_becomes_an_override():
    assert (
        to_callers_terms("`--set mesh=1,8,1`", annotations_of(prep.train))
        == '`overrides="mesh=1,8,1"`'
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=257)
    return tmp_path / "model"


def test_hint_for_an_existing_output_names_the_argument(model: Path, tmp_path: Path):
    prep.save_init(model, tmp_path / "init")
    with pytest.raises(prep.OutputExistsError) as caught:
        prep.save_init(model, tmp_path / "init", mesh="1,2,1")
    assert caught.value.hint == '`out="NAME"` or `overwrite=True`'


def test_hint_of_load_params_names_no_option(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init").path
    with pytest.raises(prep.UsageError) as caught:
        prep.load_params(init, mesh="1,1,8")
    assert '`prep.save_init("MODEL", mesh="1,1,8", pad_vocab="auto")`' in caught.value.hint
    assert caught.value.hint.endswith("or with `rules` of `prep.save_init()`")
    assert "--" not in str(caught.value)


def test_warnings_of_a_conversion_name_arguments(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def warn(display_name: str, manifest: object, observer: Observer) -> None:
        observer.warn("kv_heads is not split: `--rule 'kv_heads=none'`, then `prep verify init`")

    monkeypatch.setattr(conversion, "note_unrecorded", warn)
    (warning,) = prep.save_init(model, tmp_path / "init").warnings
    assert warning == 'kv_heads is not split: `rules="kv_heads=none"`, then `prep.verify("init")`'
