"""The public functions of `import prepcli`, on tiny checkpoints."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.operations import compute_options, options, results
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

# The parts from which options are defined, and options that only commands have.
NOT_EXPORTED = (
    "ConversionArguments",
    "GenerateArguments",
    "Minimum",
    "OptionSpec",
    "SourceTreeOptions",
    "StorageOptions",
    "TokenizeArguments",
    "TreeOptions",
    "_HtmlTable",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=257)
    return tmp_path / "model"


class RecordedProgress:
    """A progress object that records the tasks."""

    def __init__(self) -> None:
        self.tasks: list[str] = []

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.tasks.append(task)

    def advance(self, written_bytes: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


def flip_first_value(path: Path, name: str) -> None:
    """Invert the first byte of a tensor in a safetensors file."""
    data = bytearray(path.read_bytes())
    header_nbytes = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + header_nbytes])[name]["data_offsets"]
    data[8 + header_nbytes + start] ^= 0xFF
    path.write_bytes(data)


def flip_data_bit(init: Path) -> None:
    """Invert a bit of a tensor in the largest data file of an Orbax item."""
    data_file = max((init / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(data_file.read_bytes())
    # Gaps between chunks are zeros.
    position = next(index for index in range(len(data) // 2, len(data)) if data[index])
    data[position] ^= 1
    data_file.write_bytes(data)


def test_api_exports_every_name_in_all():
    assert [name for name in prep.__all__ if not hasattr(prep, name)] == []
    assert {*prep.__all__} <= {*dir(prep)}


@pytest.mark.parametrize("module", [options, compute_options, results])
def test_api_exports_the_types_of_options_and_results(module: ModuleType):
    named = vars(module).items()
    classes = {
        name: value
        for name, value in named
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and name not in NOT_EXPORTED
    }
    assert len(classes) >= 3
    assert {name: getattr(prep, name) for name in classes} == classes
    assert {*classes} <= {*prep.__all__}


def test_api_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'pad'"):
        prep.pad  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_api_import_is_lazy():
    code = "import sys, prepcli; print('numpy' in sys.modules, 'jax' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "False False\n"


def test_api_converts_there_and_back(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    padded = prep.pad_vocab(model, tmp_path / "padded", multiple=8)
    init = prep.save_init(padded.path, tmp_path / "init", mesh="1,2,1")
    again = prep.reshard(init.path, tmp_path / "again", mesh="1,1,2", compress="zstd")
    back = prep.export(again.path, tmp_path / "back", shard_size="1MB")
    assert prep.verify(back.path, model).is_equal
    assert init.bytes_written > 0
    assert init.peak_bytes > 0
    assert not init.already_done
    assert capfd.readouterr() == ("", "")


def test_api_plans_equal_the_conversions(model: Path, tmp_path: Path):
    plan = prep.save_init(model, mesh="1,1,2", pad_vocab="auto", dry_run=True).plan
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    result = prep.save_init(model, tmp_path / "init", mesh="1,1,2", pad_vocab="auto")
    assert plan.write_nbytes == result.bytes_written
    resharded = prep.reshard(result.path, mesh="1,2,1", dry_run=True).plan
    assert resharded.write_nbytes == result.bytes_written


def test_api_dry_run_of_pad_vocab_writes_no_file(model: Path, tmp_path: Path):
    padded = prep.pad_vocab(model, multiple=8, dry_run=True).plan
    assert [stream.rows for stream in padded.streams if stream.is_generated] == [(257, 264)]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_api_plan_repr_is_one_short_line(model: Path):
    plan = prep.save_init(model, dry_run=True).plan
    tensors = len(prep.inspect(model).tensors)
    nbytes = sum(tensor.nbytes for tensor in prep.inspect(model).tensors)
    assert len(plan.files) == 1
    text = f"<Plan save-init of {model}: {tensors} tensors, {nbytes:,} bytes in 1 file>"
    assert repr(plan) == text


def test_api_plan_text_lists_files_and_tensors(model: Path):
    plan = prep.pad_vocab(model, multiple=8, dry_run=True).plan
    lines = str(plan).splitlines()
    assert lines[0] == repr(plan)
    assert len(lines) == 1 + len(plan.files) + len(plan.streams)
    assert (
        "move  transformer.wte.weight  float32 [264, 32]  rows 257:264  896 bytes  filled with zeros"
        in lines
    )


def test_api_plan_export_lists_the_files(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init").path
    assert [file.path for file in prep.export(init, dry_run=True).plan.files] == [
        "model.safetensors"
    ]


def test_api_reports_progress_to_the_given_object(model: Path, tmp_path: Path):
    progress = RecordedProgress()
    prep.save_init(model, tmp_path / "init", progress=progress)
    assert progress.tasks


def test_api_second_call_finds_the_output(model: Path, tmp_path: Path):
    prep.save_init(model, tmp_path / "init")
    assert prep.save_init(model, tmp_path / "init").already_done


def test_api_verify_lists_differences(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init", dtype="bfloat16").path
    result = prep.verify(init, model)
    assert not result.is_equal
    assert result.differences


def test_api_inspect_lists_tensors(model: Path):
    contents = prep.inspect(model)
    assert contents.format == "safetensors"
    assert contents.parameters == sum(np.prod(tensor.shape) for tensor in contents.tensors)


def test_api_missing_checkpoint_is_a_prep_error(tmp_path: Path):
    with pytest.raises(prep.PrepError):
        prep.save_init(tmp_path / "missing", offline=True)


def test_api_invalid_request_is_a_usage_error(model: Path, tmp_path: Path):
    with pytest.raises(prep.UsageError, match="`multiple=8` and `size=300` exclude each other"):
        prep.pad_vocab(model, tmp_path / "padded", multiple=8, size=300)


def test_api_other_output_is_an_output_exists_error(model: Path, tmp_path: Path):
    prep.save_init(model, tmp_path / "init")
    with pytest.raises(prep.OutputExistsError):
        prep.save_init(model, tmp_path / "init", mesh="1,2,1")


def test_api_flipped_bit_is_a_damaged_error(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init").path
    flip_data_bit(init)
    with pytest.raises(prep.DamagedError):
        prep.reshard(init, tmp_path / "again", mesh="1,2,1")


def test_api_load_params_reads_any_format(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init", pad_vocab="8").path
    from_folder, from_init = prep.load_params(model), prep.load_params(init)
    query = from_folder["layers"]["attn"]["q"]["weight"]
    np.testing.assert_array_equal(query, from_init["layers"]["attn"]["q"]["weight"])
    assert query.ndim == 4  # [layers, heads, head_dim, embed]
    assert prep.load_params(init, "2,2,2")["embed"]["tokens"].sharding.num_devices == 8


def test_api_invalid_mesh_or_dtype_is_a_usage_error(model: Path):
    with pytest.raises(prep.UsageError, match="needs 16 devices"):
        prep.load_params(model, "2,2,4")
    with pytest.raises(prep.UsageError, match="invalid `dtype='int8'`"):
        prep.load_params(model, dtype="int8")  # pyright: ignore[reportArgumentType]


def test_api_accepts_a_vocabulary_multiple_as_number(model: Path, tmp_path: Path):
    from_number = prep.save_init(model, tmp_path / "number", pad_vocab=100)
    from_text = prep.save_init(model, tmp_path / "text", pad_vocab="100")
    first, second = (
        json.loads((result.path / "prep-manifest.json").read_text())
        for result in (from_number, from_text)
    )
    assert first["config"]["vocab_size"] == 300
    assert first["request"] == second["request"]


def test_api_accepts_one_rule_as_text(model: Path):
    plan = prep.save_init(model, mesh="1,2,1", rules="embed=none", dry_run=True).plan
    assert [*plan.settings["rules"]] == ["embed=none"]


def test_api_verification_is_true_if_equal(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init", dtype="bfloat16").path
    assert prep.verify(init)
    assert not prep.verify(init, model)


def test_api_verify_counts_the_ignored_padding(model: Path, tmp_path: Path):
    padded = prep.pad_vocab(model, tmp_path / "padded", multiple=8).path
    result = prep.verify(padded, model)
    assert (result.is_equal, result.ignored_padding_rows) == (True, 7)
    assert result.values == prep.verify(model, model).values
    assert prep.verify(padded, model, quick=True).ignored_padding_rows == 7
    assert prep.verify(padded).ignored_padding_rows == 0
    assert prep.verify(padded).values == prep.inspect(padded).parameters


def test_api_names_of_a_damaged_tensor_agree(model: Path, tmp_path: Path):
    folder = prep.pad_vocab(model, tmp_path / "padded", multiple=8).path
    name = "params.embed.tokens (transformer.wte.weight)"
    flip_first_value(min(folder.glob("*.safetensors")), "transformer.wte.weight")
    difference = prep.verify(folder).differences[0]
    assert f"{difference['leaf']} ({difference['tensor']})" == name
    with pytest.raises(prep.DamagedError) as caught:
        prep.load_params(folder)
    assert caught.value.what == f"{name} in {folder} is damaged"


def test_api_names_of_a_damaged_leaf_agree(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init").path
    flip_data_bit(init)
    with pytest.raises(prep.DamagedError) as caught:
        prep.load_params(init)
    assert caught.value.what == f"{prep.verify(init).differences[0]['leaf']} of {init} is damaged"


class RecordedNotes:
    """An Observer of a Python program."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, level: int = 0) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.notes.append(text)

    def progress(self) -> RecordedProgress:
        return RecordedProgress()


def test_observer_of_a_program_receives_notes(model: Path):
    observer = RecordedNotes()
    prep.pad_vocab(model, model.with_name("padded"), multiple=8, progress=observer)
    assert any("vocabulary 257 -> 264" in note for note in observer.notes)


def test_arguments_are_checked_beside_an_observer(model: Path):
    with pytest.raises(prep.UsageError) as caught:
        prep.pad_vocab(model, multiple="8", progress=RecordedNotes())  # pyright: ignore[reportArgumentType]
    assert "multiple" in caught.value.what
    assert "--" not in str(caught.value)


def test_errors_name_arguments_beside_an_observer(model: Path):
    with pytest.raises(prep.UsageError) as caught:
        prep.pad_vocab(model, size=5, progress=RecordedNotes())
    assert "`size=5` is too small" in str(caught.value)
