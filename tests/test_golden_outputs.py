"""The bytes of every command's output are those that `tests/golden/outputs.json` records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from tests.helpers import golden_outputs
from tests.helpers.golden_cases import Case, all_cases, default_cases
from tests.helpers.golden_outputs import (
    Output,
    explain,
    field_differences,
    open_site,
    read_digests,
    record,
    run_case,
    stable_content,
)
from tests.helpers.object_server import FakeObjectStore
from tests.helpers.slow_cases import slow_except

CASES = all_cases()
# Version of the zstd library that the recorded bytes were compressed with.
RECORDED_ZSTD = (1, 5, 7)
# Further options that change no byte, and cases of each kind of output that they are tried on.
SAME_BYTES: dict[str, tuple[str, ...]] = {
    "workers": ("--workers", "2"),
    "small memory": ("--memory", "32MiB"),
}
SAMPLED = (
    "save-init llama --mesh 1,2,2 --pad-vocab 8 --storage ocdbt",
    "save-init llama --mesh 1,2,2 --pad-vocab 8 --storage files --compress zstd",
    "save-init llama --mesh 1,2,2 --pad-vocab 8 --storage zarr3 > gs://bucket/out",
    "save-init q-gptq --quantized dequantize --mesh 1,2,1",
    "reshard run --mesh 1,2,1",
    "export llama-init --shard-size 20KB",
    "export llama-init --layout levanter --format tensorstore",
    "export llama-init --layout hf --format dcp > gs://bucket/out",
    "export run --training-state",
    "pad-vocab llama --init mean",
    "add-tokens words --tokens tokens.txt",
    "merge adapter llama-bf16",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeObjectStore]:
    """Serve an object store, in a working folder that keeps the inputs of all cases."""
    with open_site(tmp_path_factory.mktemp("golden")) as store:
        yield store


@pytest.mark.parametrize("name", slow_except(CASES, default_cases()))
def test_output_has_the_recorded_bytes(store: FakeObjectStore, name: str):
    if CASES[name].package:
        pytest.importorskip(CASES[name].package)
    if CASES[name].is_compressed and zstandard.ZSTD_VERSION != RECORDED_ZSTD:
        pytest.skip("compressed bytes are those of another version of zstd")
    check(CASES[name], run_case(CASES[name], store))


@pytest.mark.slow
@pytest.mark.parametrize("options", SAME_BYTES)
@pytest.mark.parametrize("name", SAMPLED)
def test_bytes_do_not_depend_on_options(store: FakeObjectStore, name: str, options: str):
    check(CASES[name], run_case(CASES[name], store, *SAME_BYTES[options]))


def check(case: Case, output: Output) -> None:
    """Fail with the files and fields that differ from the recorded ones."""
    if output.digest != read_digests().get(case.name):
        pytest.fail(explain(case.name, output), pytrace=False)


def test_recorded_cases_are_the_cases():
    assert sorted(read_digests()) == sorted(CASES)


def test_explanation_names_files_and_fields():
    name = "export llama-init --layout hf --format safetensors"
    same = '{"mesh": "1,2,2"}'
    output = Output(0, {"config.json": "0" * 32, "new.bin": "1" * 32}, {"config.json": same})
    lines = explain(name, output).splitlines()
    assert lines[1] == "  config.json: differs"
    assert "    mesh: new" in lines
    assert "  model.safetensors: missing" in lines
    assert "  new.bin: new" in lines


def test_record_keeps_the_files_of_other_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(golden_outputs, "DIGESTS", tmp_path / "outputs.json")
    monkeypatch.setattr(golden_outputs, "DETAILS", tmp_path / "outputs_details.json.xz")
    first = Output(0, {"config.json": "0" * 32}, {"config.json": '{"a": 1}'})
    second = Output(0, {"config.json": "1" * 32}, {"config.json": '{"a": 2}'})
    record({"one": first, "two": first, "old": first}, keep=())
    record({"two": second}, keep=("one", "two"))
    assert read_digests() == {"one": first.digest, "two": second.digest}
    assert explain("two", first).splitlines()[1:] == ["  config.json: differs", "    a: 2 -> 1"]
    assert explain("one", second).splitlines()[1:] == ["  config.json: differs", "    a: 1 -> 2"]


def test_refused_command_is_recorded_by_its_exit_code():
    assert Output(2).digest == "exit code 2"
    assert Output(0).digest != Output(0, {"empty": "0" * 32}).digest


def test_field_differences_name_each_place():
    before = {"a": {"b": [1, {"c": 2}]}, "d": 1, "e": True}
    after = {"a": {"b": [1, {"c": 3}]}, "e": 1, "f": 2}
    assert field_differences(before, after) == [
        "    a.b[1].c: 2 -> 3",
        "    d: missing",
        "    e: true -> 1",
        "    f: new",
    ]
    assert field_differences({"a": 1, "b": 2}, {"b": 2, "a": 1}) == [
        "    document: other order of keys"
    ]


def test_stable_content_leaves_out_values_of_training():
    path = "2/prep-manifest.json"
    manifest = f'{{"family": "llama", "plan": "xxh3:{"0" * 32}", "environment": {{"jax": "1"}}}}'
    other = manifest.replace("0" * 32, "1" * 32).replace('"1"', '"2"')
    assert stable_content(path, manifest.encode()) == manifest.encode()
    kept = stable_content(path, manifest.encode(), is_trained=True)
    assert kept == stable_content(path, other.encode(), is_trained=True)
    assert b"llama" in kept
    assert stable_content("d/0", b"abc", is_trained=True) == b"3 bytes"
