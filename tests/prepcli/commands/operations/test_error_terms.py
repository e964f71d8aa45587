"""Errors and warnings name Python arguments for callers of the functions, and options for users of the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations import conversion
from prepcli.commands.operations.checkpoint_options import CommonOptions, open_checkpoint
from prepcli.commands.operations.operation import check_mutually_exclusive
from prepcli.core.errors import PYTHON, TERMINAL, Command, Key, Option, PrepError, text
from prepcli.core.observer import Observer
from prepcli.formats.manifest import no_step_error
from prepcli.formats.safetensors import ADAPTER_HINT
from prepcli.models.mesh import parse_mesh, parse_slice_counts, resolve_mesh
from prepcli.models.rule_text import merge_rules
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from trainer.planning.step_time import parse_devices


def error_of(function: Callable[..., object], *args: object, **kwargs: object) -> PrepError:
    """Return the error that a call raises."""
    with pytest.raises(PrepError) as caught:
        function(*args, **kwargs)
    return caught.value


def mesh_of_option() -> None:
    """Resolve a mesh for more devices than there are, as `load_params` does."""
    resolve_mesh(parse_mesh("1,1,8"), 4, origin=Option("mesh"))


@pytest.mark.parametrize(
    ("raise_error", "terminal", "python"),
    [
        (
            lambda: parse_mesh("1,64"),
            "`--mesh 1,64` has 2 axes",
            '`mesh="1,64"` has 2 axes',
        ),
        (
            lambda: parse_mesh("1,64", Key("mesh")),
            '`mesh = "1,64"` has 2 axes',
            '`mesh = "1,64"` has 2 axes',
        ),
        (
            lambda: merge_rules(["embd=fsdp"]),
            "`--rule embd=fsdp`: unknown dim `embd`",
            '`rules="embd=fsdp"`: unknown dim `embd`',
        ),
        (
            lambda: merge_rules(["embd=fsdp"], origin=Key("rules")),
            '`rules = ["embd=fsdp"]`: unknown dim `embd`',
            '`rules = ["embd=fsdp"]`: unknown dim `embd`',
        ),
        (
            lambda: parse_devices("v9:8"),
            "`--devices v9:8`: unknown kind `v9`",
            '`devices="v9:8"`: unknown kind `v9`',
        ),
        (
            lambda: check_mutually_exclusive({"size": 8, "multiple": 4}),
            "`--size 8` and `--multiple 4` exclude each other",
            "`size=8` and `multiple=4` exclude each other",
        ),
    ],
)
def test_error_names_the_option_for_terminal_and_python(
    raise_error: Callable[[], object], terminal: str, python: str
):
    error = error_of(raise_error)
    assert error.rendered(TERMINAL).what == terminal
    assert error.rendered(PYTHON).what == python


@pytest.mark.parametrize(
    ("raise_error", "terminal", "python"),
    [
        (lambda: parse_mesh(""), "`--mesh 1,64,4`", '`mesh="1,64,4"`'),
        (mesh_of_option, "`--mesh 1,4,1`", '`mesh="1,4,1"`'),
        (
            lambda: resolve_mesh(parse_mesh("1,1,8"), 4),
            "`--set mesh=1,4,1`",
            '`overrides="mesh=1,4,1"`',
        ),
        (
            lambda: merge_rules(["embed"]),
            "`--rule 'kv_heads=mp|none'`",
            '`rules="kv_heads=mp|none"`',
        ),
        (
            lambda: parse_slice_counts("dp:-1"),
            "`--set cluster.dcn_mesh=dp:2`",
            '`overrides="cluster.dcn_mesh=dp:2"`',
        ),
        (lambda: parse_devices("v5p:0"), "`--devices v5p:256`", '`devices="v5p:256"`'),
        (
            lambda: check_mutually_exclusive({"size": 8, "multiple": 4}),
            "pass only one of `--size`, `--multiple`",
            "pass only one of `size`, `multiple`",
        ),
    ],
)
def test_hint_names_the_option_for_terminal_and_python(
    raise_error: Callable[[], object], terminal: str, python: str
):
    error = error_of(raise_error)
    assert error.rendered(TERMINAL).hint == terminal
    assert error.rendered(PYTHON).hint == python


def test_hint_names_the_command_for_terminal_and_python():
    error = no_step_error("runs/a")
    assert error.rendered(TERMINAL).hint == "`prep train RECIPE --out runs/a` continues it"
    assert error.rendered(PYTHON).hint == '`prep.train("RECIPE", out="runs/a")` continues it'
    assert ADAPTER_HINT.startswith("`prep merge ADAPTER BASE` adds")
    assert ADAPTER_HINT.render(PYTHON).startswith('`prep.merge("ADAPTER", "BASE")` adds')


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=257)
    return tmp_path / "model"


def test_hint_for_an_existing_output_names_the_argument(model: Path, tmp_path: Path):
    prep.save_init(model, tmp_path / "init")
    error = error_of(prep.save_init, model, tmp_path / "init", mesh="1,2,1")
    assert isinstance(error, prep.OutputExistsError)
    assert error.hint == '`out="NAME"` or `overwrite=True`'


def test_hint_for_an_existing_output_names_the_option(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prep.save_init(model, tmp_path / "init")
    words = ["save-init", str(model), "--out", str(tmp_path / "init"), "--mesh", "1,2,1", "--json"]
    main(words)
    assert json.loads(capsys.readouterr().out)["error"]["hint"] == "`--out NAME` or `--overwrite`"


def test_error_of_load_params_names_no_option(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init").path
    error = error_of(prep.load_params, init, mesh="1,1,8")
    assert '`prep.save_init("MODEL", mesh="1,1,8", pad_vocab="auto")`' in error.hint
    assert error.hint.endswith("or with `rules` of `prep.save_init()`")
    assert "--" not in str(error)


def test_rule_in_a_hint_names_the_argument(tmp_path: Path):
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=256)
    error = error_of(prep.save_init, tmp_path / "model", tmp_path / "init", mesh="1,1,3")
    assert "--" not in str(error)


def test_warning_of_a_conversion_names_arguments(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def open_with_warning(
        common: CommonOptions, observer: Observer, *args: Any, **options: Any
    ) -> tuple[LocatedCheckpoint, Source]:
        rule = Option("rules", "kv_heads=none")
        observer.warn(text("not split: {}, then {}", rule, Command("verify", "init")))
        return open_checkpoint(common, observer, *args, **options)

    monkeypatch.setattr(conversion, "open_checkpoint", open_with_warning)
    (warning,) = prep.save_init(model, tmp_path / "init").warnings
    assert warning == 'not split: `rules="kv_heads=none"`, then `prep.verify("init")`'
