"""Options: defined once, rejected without effect, and named in errors as the caller writes them."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli import root
from prepcli.commands.cli.launch import ENGINE_COMMANDS
from prepcli.commands.cli.root import all_commands
from prepcli.commands.console.ui import open_ui
from prepcli.commands.operations import conversion
from prepcli.commands.operations.checkpoint_options import CommonOptions, open_checkpoint
from prepcli.commands.operations.export_request import parse_shard_size
from prepcli.commands.operations.operation import check_mutually_exclusive
from prepcli.commands.operations.options import (
    AddTokensOptions,
    ExportOptions,
    MergeOptions,
    PadVocabOptions,
    RemoveTokensOptions,
    ReshardOptions,
    SaveInitOptions,
)
from prepcli.commands.operations.save_init import save_init
from prepcli.core.errors import PYTHON, TERMINAL, Command, Key, Option, PrepError, text
from prepcli.core.observer import Observer
from prepcli.core.option_spec import (
    option_specs,
)
from prepcli.engine.budget import MIN_MEMORY_NBYTES, parse_memory
from prepcli.formats.manifest import no_step_error
from prepcli.formats.safetensors import ADAPTER_HINT
from prepcli.models.mesh import parse_mesh, parse_slice_counts, resolve_mesh
from prepcli.models.rules import merge_rules
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_json, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from trainer.planning.step_time import parse_devices

CONFLICTS = ["--multiple 8 --size 300", "--size 300 --mesh 1,1,8", "--multiple 8 --mesh 1,1,8"]
PADDED = ("--pad-vocab", "8")
OPTIONS_WITHOUT_EFFECT = [
    (["pad-vocab", "./m", "--seed", "3"], "--seed", "--init normal"),
    (["save-init", "./m", "--init", "mean"], "--init", "--pad-vocab"),
    (["save-init", "./m", "--seed", "3"], "--seed", "--pad-vocab"),
    (["save-init", "./m", *PADDED, "--init", "mean", "--seed", "3"], "--seed", "--init normal"),
    (["save-init", "./m", "--pad-vocab", "auto"], "--pad-vocab auto", "--mesh"),
    (["save-init", "./m", "--no-scan", "--scan-axis", "1"], "--scan-axis", "--scan"),
    (["save-init", "./m", "--allow-overflow"], "--allow-overflow", "--dtype"),
    (["reshard", "./unstacked", "--scan-axis", "1"], "--scan-axis", "--scan"),
    (["export", "./unstacked", "--allow-overflow"], "--allow-overflow", "--dtype"),
    (["generate", "./m", "--tokens", "1", "--top-k", "5"], "--top-k", "--temperature"),
    (["generate", "./m", "--tokens", "1", "--top-p", "0.5"], "--top-p", "--temperature"),
    (["generate", "./m", "--tokens", "1", "--seed", "5"], "--seed", "--temperature"),
]
STREAMED_FOLDERS = [
    ["save-init", "./m", "--stream"],
    ["verify", "./unstacked", "--stream"],
    ["verify", "./unstacked", "./m", "--stream"],
    ["inspect", "./m", "--stream"],
    ["inspect", "./m", "--diff", "./m", "--stream"],
]


def _test_id(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Hugging Face folder `m` and its init `unstacked`."""
    folder = tmp_path_factory.mktemp("options")
    make_checkpoint(folder / "m", GPT_NEO, vocab_size=131, hidden_size=32)
    run_ok("save-init", str(folder / "m"), "--no-scan", "--out", str(folder / "unstacked"))
    return folder


@pytest.fixture
def work_dir(folder: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("options", CONFLICTS)
def test_vocabulary_sizes_are_mutually_exclusive(
    options: str, work_dir: Path, capsys: Capture
) -> None:
    first, a, second, b = options.split()
    lines = error_lines(capsys, "pad-vocab", "./m", first, a, second, b)
    assert lines[0] == f"error: `{first} {a}` and `{second} {b}` exclude each other"
    assert {path.name for path in work_dir.iterdir()} == {"m", "unstacked"}


@pytest.mark.parametrize(("words", "option", "needed"), OPTIONS_WITHOUT_EFFECT, ids=_test_id)
def test_options_without_effect_are_rejected(
    words: list[str], option: str, needed: str, work_dir: Path, capsys: Capture
) -> None:
    what, _, hint = error_lines(capsys, *words)
    assert what == f"error: `{option}` has no effect without `{needed}`"
    assert hint == f" hint: add `{needed}`, or remove `{option}`"
    assert {path.name for path in work_dir.iterdir()} == {"m", "unstacked"}


@pytest.mark.parametrize("words", STREAMED_FOLDERS, ids=_test_id)
def test_stream_is_rejected_for_local_folders(
    words: list[str], work_dir: Path, capsys: Capture
) -> None:
    what, _, hint = error_lines(capsys, *words)
    assert (what, hint) == ("error: `--stream` has no effect", " hint: remove `--stream`")


def test_sort_is_rejected_with_diff(work_dir: Path, capsys: Capture) -> None:
    lines = error_lines(capsys, "inspect", "./m", "--diff", "./m", "--sort", "size")
    assert lines[0] == "error: `--sort size` has no effect"


def test_empty_mesh_in_library_call_is_rejected(work_dir: Path) -> None:
    with pytest.raises(PrepError, match="invalid `mesh=''`"):
        save_init("./m", "out", mesh="")
    # The operation has a check of its own, for callers whose arguments are not checked first.
    silent = open_ui("save-init", as_json=False, quiet=True, verbose=0, progress="none")
    with pytest.raises(PrepError, match="`mesh` is empty"):
        save_init("./m", "out", progress=silent, mesh="")


def test_empty_mesh_in_recipe_is_rejected(work_dir: Path, capsys: Capture) -> None:
    recipe = work_dir.parent / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[data]\ntype = "text"\npath = "a.txt"\nseq_length = 8\n[batch]\nsize = 1\n'
        "[optimizer]\nlr = 1.0\n[train]\nsteps = 1\n"
    )
    for setting in ("mesh=", 'mesh=""'):
        lines = error_lines(capsys, "train", str(recipe), "--set", setting)
        assert lines[0] == "error: `--set`: `mesh` is empty"


@pytest.mark.parametrize("text", ["5", "0", "0GB", "1048575", "999 "])
def test_small_shard_size_without_unit_is_rejected(text: str) -> None:
    with pytest.raises(PrepError, match="`shard_size=") as caught:
        parse_shard_size(text)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1048576", 1 << 20), ("8KB", 8000), ("5GB", 5 * 10**9)]
)
def test_shard_size_with_unit_may_be_small(text: str, nbytes: int) -> None:
    assert parse_shard_size(text) == nbytes


@pytest.mark.parametrize(("text", "why"), [("5", "it is 5 bytes; "), ("31.5 MiB", "")])
def test_small_memory_is_quoted_as_typed(text: str, why: str) -> None:
    with pytest.raises(PrepError) as caught:
        parse_memory(text)
    # As it has to be typed in a shell, where a value with a space stands in quotes.
    assert caught.value.what == f"`--memory {shlex.quote(text)}` is below the minimum"
    assert caught.value.why.startswith(f"{why}the engine needs")
    assert caught.value.hint == "`--memory 32MiB` or more"
    assert parse_memory("32MiB") == MIN_MEMORY_NBYTES


@pytest.mark.parametrize("option", [("--memory", "5"), ("--processes", "4")])
def test_dry_run_rejects_invalid_options(
    option: tuple[str, str], work_dir: Path, capsys: Capture
) -> None:
    assert error_lines(capsys, "save-init", "./m", "--dry-run", *option)[0].startswith(
        f"error: `{' '.join(option)}` is "
    )


# Options that are defined once: what the recorded command line and the commands derive from them


COMMAND_FUNCTIONS = {command.name: command.function for command in all_commands()}
# The keyword options of the function of each command.
OPTIONS_BY_COMMAND: dict[str, type] = {
    "pad-vocab": PadVocabOptions,
    "add-tokens": AddTokensOptions,
    "remove-tokens": RemoveTokensOptions,
    "save-init": SaveInitOptions,
    "reshard": ReshardOptions,
    "export": ExportOptions,
    "merge": MergeOptions,
}
# Options of the Python functions that the commands do not have.
ONLY_IN_PYTHON = {
    "pad-vocab": {"step"},
    "add-tokens": {"step"},
    "remove-tokens": {"step"},
    "save-init": {"step"},
    "reshard": {"revision", "offline", "stream", "true_vocab"},
    "export": {"revision", "offline", "stream"},
    "merge": {"step"},
}


@pytest.mark.parametrize("command", OPTIONS_BY_COMMAND)
def test_commands_have_the_options_of_their_operation(command: str):
    specs = option_specs(OPTIONS_BY_COMMAND[command])
    parameters = inspect.signature(COMMAND_FUNCTIONS[command]).parameters
    assert specs.keys() - parameters.keys() == ONLY_IN_PYTHON[command]


def test_commands_define_no_options_of_their_own():
    folder = Path(inspect.getfile(root)).parent
    modules = [path.name for path in folder.glob("*.py") if "typer.Option(" in path.read_text()]
    # The options of all commands, those made from TypedDicts, and `prep --version`.
    assert sorted(modules) == ["option_groups.py", "root.py"]


def test_required_option_has_no_default():
    (tpu,) = [engine for engine in ENGINE_COMMANDS if engine.name == "tpu"]
    parameters = inspect.signature(tpu.function).parameters
    assert parameters["zone"].default is inspect.Parameter.empty
    assert parameters["project"].default is None


# Errors and warnings name Python arguments for callers of the functions, and options for users of the commands


def error_of(function: Callable[..., object], *args: object, **kwargs: object) -> PrepError:
    """Return the error that a call raises."""
    with pytest.raises(PrepError) as caught:
        function(*args, **kwargs)
    return caught.value


def mesh_of_option() -> None:
    """Resolve a mesh for more devices than there are, as `load_params` does."""
    resolve_mesh(parse_mesh("1,1,8"), 4, origin=Option("mesh"))


def mesh_of_recipe() -> None:
    resolve_mesh(parse_mesh("1,1,8"), 4)


def both_sizes() -> None:
    check_mutually_exclusive({"size": 8, "multiple": 4})


# A call, and the part of its error for a terminal and for Python.
ERRORS: list[tuple[Callable[[], object], str, str]] = [
    (lambda: parse_mesh("1,64"), "`--mesh 1,64` has 2 axes", '`mesh="1,64"` has 2 axes'),
    (lambda: parse_mesh("1,64", Key("mesh")), '`mesh = "1,64"` has', '`mesh = "1,64"` has'),
    (lambda: merge_rules(["embd=fsdp"]), "`--rule embd=fsdp`: unknown", '`rules="embd=fsdp"`:'),
    (
        lambda: merge_rules(["embd=fsdp"], origin=Key("rules")),
        '`rules = ["embd=fsdp"]`: unknown dim `embd`',
        '`rules = ["embd=fsdp"]`: unknown dim `embd`',
    ),
    (lambda: parse_devices("v9:8"), "`--devices v9:8`: unknown", '`devices="v9:8"`: unknown'),
    (both_sizes, "`--size 8` and `--multiple 4` exclude", "`size=8` and `multiple=4` exclude"),
    (lambda: parse_mesh(""), "`--mesh 1,64,4`", '`mesh="1,64,4"`'),
    (mesh_of_option, "`--mesh 1,4,1`", '`mesh="1,4,1"`'),
    (mesh_of_recipe, "`--set mesh=1,4,1`", '`overrides="mesh=1,4,1"`'),
    (lambda: merge_rules(["embed"]), "`--rule 'kv_heads=mp|none'`", '`rules="kv_heads=mp|none"`'),
    (
        lambda: parse_slice_counts("dp:-1"),
        "`--set cluster.dcn_mesh=dp:2`",
        '`overrides="cluster.dcn_mesh=dp:2"`',
    ),
    (lambda: parse_devices("v5p:0"), "`--devices v5p:256`", '`devices="v5p:256"`'),
    (both_sizes, "pass only one of `--size`, `--multiple`", "pass only one of `size`, `multiple`"),
]


@pytest.mark.parametrize(("raise_error", "terminal", "python"), ERRORS)
def test_error_names_the_option_for_terminal_and_python(
    raise_error: Callable[[], object], terminal: str, python: str
):
    error = error_of(raise_error)
    for surface, part in ((TERMINAL, terminal), (PYTHON, python)):
        rendered = error.rendered(surface)
        assert part in f"{rendered.what}\n{rendered.hint}"


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


def test_hint_for_an_existing_output_names_argument_or_option(
    model: Path, tmp_path: Path, capsys: Capture
):
    prep.save_init(model, tmp_path / "init")
    error = error_of(prep.save_init, model, tmp_path / "init", mesh="1,2,1")
    assert isinstance(error, prep.OutputExistsError)
    assert error.hint == '`out="NAME"` or `overwrite=True`'
    words = ("save-init", str(model), "--out", str(tmp_path / "init"), "--mesh", "1,2,1")
    assert run_json(capsys, *words)["error"]["hint"] == "`--out NAME` or `--overwrite`"


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
    model: Path, tmp_path: Path, monkeypatch: MonkeyPatch
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


def test_shard_size_hint_has_a_unit() -> None:
    with pytest.raises(PrepError) as caught:
        parse_shard_size("5")
    assert (caught.value.why, caught.value.hint) == (
        "a number without a unit is in bytes: 5 bytes",
        "`--shard-size 5GB`",
    )
