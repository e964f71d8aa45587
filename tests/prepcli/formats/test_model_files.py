"""Folders of safetensors: selected files and inconsistent indexes. Configs of params.json of Meta."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prepcli.core.errors import PrepError
from prepcli.formats.meta_llama_config import is_small_llama_3_2, to_hf_config
from prepcli.formats.model_files import check_numbered_files, read_weight_map, shard_name
from prepcli.formats.safetensors import (
    iter_folder_tensors,
    read_safetensors_folder,
    select_safetensors_files,
)
from prepcli.models.registry import FAMILIES

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def write(folder: Path, file: str, *names: str) -> None:
    save_file({name: np.arange(len(name), dtype=np.float32) for name in names}, folder / file)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1.5e9}, "weight_map": weight_map})
    )


def sharded(folder: Path) -> dict[str, str]:
    """Write three files of five tensors, and return their weight_map."""
    files = {SECOND: ["b", "bb"], FIRST: ["aa", "a"], THIRD: ["c"]}
    for file, names in files.items():
        write(folder, file, *names)
    return {name: file for file, names in files.items() for name in names}


def refusal(folder: Path) -> PrepError:
    with pytest.raises(PrepError) as caught:
        read_safetensors_folder(folder)
    return caught.value


def test_read_folder_sorts_files_and_tensors(tmp_path: Path) -> None:
    write_index(tmp_path, sharded(tmp_path))
    folder = read_safetensors_folder(tmp_path)
    assert folder.path == tmp_path
    assert [header.file_name for header in folder.headers] == [FIRST, SECOND, THIRD]
    assert [(t.name, t.file) for t in folder.tensors] == [
        ("a", 0),
        ("aa", 0),
        ("b", 1),
        ("bb", 1),
        ("c", 2),
    ]
    assert folder.tensors == tuple(t for header in folder.headers for t in header.tensors)
    positions = [(t.file, t.offset) for t in folder.tensors]
    assert positions == sorted(positions)


def test_files_missing_from_the_index_are_ignored(tmp_path: Path) -> None:
    write_index(tmp_path, sharded(tmp_path))
    write(tmp_path, "consolidated.safetensors", "a", "other")
    (tmp_path / "broken.safetensors").write_bytes(b"")
    assert len(read_safetensors_folder(tmp_path).headers) == 3


def test_hub_cache_of_links_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    write_index(blobs, sharded(blobs))
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../blobs/{blob.name}")
    assert [header.file_name for header in read_safetensors_folder(snapshot).headers] == [
        FIRST,
        SECOND,
        THIRD,
    ]


def test_model_safetensors_is_preferred_without_index(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", "a")
    write(tmp_path, "consolidated.safetensors", "b")
    folder = read_safetensors_folder(tmp_path)
    assert [t.name for t in folder.tensors] == ["a"]


@pytest.mark.parametrize("has_shards", [False, True])
def test_index_of_an_earlier_save_is_left(tmp_path: Path, has_shards: bool) -> None:
    """`save_pretrained` leaves the index of an earlier save, and transformers does not read it."""
    weight_map = sharded(tmp_path)
    write_index(tmp_path, weight_map)
    write(tmp_path, "model.safetensors", "a", "new")
    if not has_shards:
        for file in {*weight_map.values()}:
            (tmp_path / file).unlink()
    folder = read_safetensors_folder(tmp_path)
    assert [t.name for t in folder.tensors] == ["a", "new"]
    assert [t.name for t in iter_folder_tensors(tmp_path)] == ["a", "new"]
    assert [path.name for path in folder.files] == ["model.safetensors"]


def test_index_with_model_safetensors_is_read(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", "a")
    write_index(tmp_path, {**sharded(tmp_path), "a": "model.safetensors"})
    folder = read_safetensors_folder(tmp_path)
    assert sorted(t.name for t in folder.tensors) == ["a", "aa", "b", "bb", "c"]


def test_all_visible_files_are_read_without_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    write(tmp_path, ".hidden.safetensors", "a")
    assert [t.name for t in read_safetensors_folder(tmp_path).tensors] == [
        "a",
        "aa",
        "b",
        "bb",
        "c",
    ]


def test_file_of_any_name_is_read_without_index(tmp_path: Path) -> None:
    write(tmp_path, "weights.safetensors", "a")
    assert read_safetensors_folder(tmp_path).headers[0].file_name == "weights.safetensors"


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        ([], []),
        (["pytorch_model.bin", ".hidden.safetensors"], []),
        (["b.safetensors", "a.safetensors"], ["b.safetensors", "a.safetensors"]),
        (["a.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", INDEX], [INDEX]),
    ],
)
def test_select_safetensors_files_prefers_the_index(names: list[str], selected: list[str]) -> None:
    assert select_safetensors_files(names) == selected


def test_folder_without_safetensors_is_rejected(tmp_path: Path) -> None:
    assert refusal(tmp_path).what == f"{tmp_path} has no safetensors files"
    assert refusal(tmp_path / "absent").what == f"cannot read {tmp_path / 'absent'}"


def test_adapter_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, "adapter_model.safetensors", "a.lora_A.weight")
    error = refusal(tmp_path)
    assert error.what == f"{tmp_path} is an adapter, not a model"
    assert "adapter_model.safetensors" in error.why
    assert error.hint.startswith("`prep merge ADAPTER BASE`")


def test_adapter_beside_a_model_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, "adapter_model.safetensors", "a.lora_A.weight")
    write(tmp_path, "model.safetensors", "a")
    assert [t.name for t in read_safetensors_folder(tmp_path).tensors] == ["a"]


def test_missing_file_error_has_tensor_counts(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    write_index(snapshot, sharded(snapshot))
    (snapshot / SECOND).unlink()
    error = refusal(snapshot)
    assert error.what == f"1 of 3 files of {snapshot} is missing"
    assert error.why == f"the index names {SECOND} (2 tensors)"
    assert error.hint == "`hf download acme/tiny`"
    (snapshot / THIRD).unlink()
    error = refusal(snapshot)
    assert error.what == f"2 of 3 files of {snapshot} are missing"
    assert error.why == f"the index names {SECOND} (2 tensors), {THIRD} (1 tensor)"


def test_many_missing_files_are_counted(tmp_path: Path) -> None:
    write_index(tmp_path, {str(i): shard_name("model", i, 30, "safetensors") for i in range(1, 31)})
    assert refusal(tmp_path).what == f"30 of 30 files of {tmp_path} are missing"
    assert refusal(tmp_path).why.endswith("model-00003-of-00030.safetensors (1 tensor) and 27 more")
    assert refusal(tmp_path).hint == f"`hf download OWNER/NAME --local-dir {tmp_path}`"


def test_dangling_link_is_missing(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "model.safetensors"})
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert refusal(tmp_path).what == f"1 of 1 files of {tmp_path} is missing"
    (tmp_path / INDEX).unlink()
    assert refusal(tmp_path).what == f"cannot read {tmp_path / 'model.safetensors'}"


def test_numbered_files_without_index_must_be_complete(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / SECOND).unlink()
    error = refusal(tmp_path)
    assert error.what == f"1 of 3 files of {tmp_path} is missing"
    assert SECOND in error.why


def test_tensor_in_two_files_is_rejected_without_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    write(tmp_path, THIRD, "c", "a")
    error = refusal(tmp_path)
    assert error.what == f"tensor `a` is in two files of {tmp_path}"
    assert error.why == f"{FIRST} and {THIRD}"


def test_index_selects_one_of_two_files(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    write(tmp_path, THIRD, "c", "a", "further")
    write_index(tmp_path, {**weight_map, "a": THIRD})
    folder = read_safetensors_folder(tmp_path)
    assert [t.name for t in folder.tensors] == ["aa", "b", "bb", "a", "c"]
    assert {(t.name, t.file) for t in folder.unindexed} == {("a", FIRST), ("further", THIRD)}


MISSING = {
    "only in the index": ({"x": FIRST, "y": THIRD}, "2 only in the index: `x`, `y`"),
    "in another file": ({"a": SECOND}, "1 not in the file that the index names: `a`"),
    "two of it": (
        {"x": FIRST, "a": SECOND},
        "1 only in the index: `x`; 1 not in the file that the index names: `a`",
    ),
}


@pytest.mark.parametrize(("changes", "why"), MISSING.values(), ids=MISSING)
def test_index_with_missing_tensors_is_rejected(
    tmp_path: Path, changes: dict[str, str], why: str
) -> None:
    write_index(tmp_path, {**sharded(tmp_path), **changes})
    error = refusal(tmp_path)
    assert error.what == f"files of {tmp_path} lack tensors that the index names"
    assert error.why == why
    assert all(file in error.hint for file in changes.values())


UNSAFE = [
    "/etc/model.safetensors",
    "../model.safetensors",
    "sub/model.safetensors",
    "sub\\model.safetensors",
    "C:model.safetensors",
    "a\nmodel.safetensors",
    "\x00.safetensors",
]


@pytest.mark.parametrize("file", UNSAFE)
def test_index_with_file_outside_the_folder_is_rejected(tmp_path: Path, file: str) -> None:
    write_index(tmp_path, {"a": file})
    error = refusal(tmp_path)
    assert error.what == f"{tmp_path / INDEX} is not a usable index"
    assert error.why.endswith("which is not the bare name of a file")
    assert error.why.isprintable()


def test_overlong_file_name_is_missing(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "m" * 300 + ".safetensors"})
    assert refusal(tmp_path).what == f"1 of 1 files of {tmp_path} is missing"


INDEXES = {
    "empty": (b"", "JSON is broken"),
    "no JSON": (b"weights", "JSON is broken"),
    "a list": (b"[]", "no weight_map"),
    "no weight_map": (b'{"metadata": {}}', "no weight_map"),
    "weight_map of no tensor": (b'{"weight_map": {}}', "no weight_map"),
    "weight_map that is no object": (b'{"weight_map": ["a"]}', "no weight_map"),
    "file that is no text": (
        b'{"weight_map": {"a": 1}}',
        "`a` in something other than a *.safetensors file",
    ),
    "file of another kind": (
        b'{"weight_map": {"a": "x.bin"}}',
        "`a` in something other than a *.safetensors file",
    ),
    "tensor twice": (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "`a` twice"),
    "not UTF-8": (b'{"weight_map": {"\xff": 1}}', "not UTF-8"),
    "half a surrogate pair": (b'{"weight_map": {"\\udc00": 1}}', "not UTF-8"),
    "bomb": (b'{"weight_map":' * 100_000, "nested too deeply"),
    "endless number": (b'{"metadata":' + b"9" * 1_000_000 + b', "weight_map": 0}', "no weight_map"),
    "infinite number": (b'{"metadata": Infinity}', "Infinity is not JSON"),
}


@pytest.mark.parametrize(("content", "why"), INDEXES.values(), ids=INDEXES)
def test_invalid_index_is_rejected(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / INDEX).write_bytes(content)
    error = refusal(tmp_path)
    assert error.what == f"{tmp_path / INDEX} is not a usable index"
    assert why in error.why
    assert error.hint


def test_index_above_the_size_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(200_000_000)
    assert "200,000,000 bytes" in refusal(tmp_path).why


def test_folder_as_index_is_rejected(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()
    assert refusal(tmp_path).what == f"{tmp_path / INDEX} is not a file"


def test_read_weight_map_reads_a_torch_index(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text('{"metadata": {"total_size": "12"}, "weight_map": {"a": "x.bin"}}')
    assert read_weight_map(path) == {"a": "x.bin"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["weight_map", "metadata", "a"]) | st.text(max_size=2),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
)
def test_any_index_is_read_or_rejected(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / INDEX
    path.write_bytes(text)
    with pytest.raises(PrepError, match=re.escape(str(path))):
        read_safetensors_folder(tmp_path)


def test_check_numbered_files_has_bounded_memory(tmp_path: Path) -> None:
    """Check 300 sets of 99,999 files each, a list of which would take gigabytes."""
    names = [f"set{number:03d}-00001-of-99999.bin" for number in range(300)]
    tracemalloc.start()
    with pytest.raises(PrepError) as caught:
        check_numbered_files(tmp_path, [*names, "set000-00003-of-99999.bin"])
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < 1 << 20
    assert caught.value.what == f"29999399 of 29999700 files of {tmp_path} are missing"
    shown = ", ".join(f"set000-{number:05d}-of-99999.bin" for number in (2, 4, 5))
    assert caught.value.why == f"the names of the other files imply {shown} and 29,999,396 more"


LLAMA_1 = {
    "dim": 4096,
    "multiple_of": 256,
    "n_heads": 32,
    "n_layers": 32,
    "norm_eps": 1e-06,
    "vocab_size": -1,
}
LLAMA_3 = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024,
    "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0,
}  # fmt: skip
SCALED = LLAMA_3 | {"use_scaled_rope": True}
MODELS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {  # params, vocabulary size, expected fields
    "7B": (LLAMA_1, 32000, {"intermediate_size": 11008, "max_position_embeddings": 2048, "num_key_value_heads": 32}),
    "13B": (LLAMA_1 | {"dim": 5120, "n_heads": 40, "n_layers": 40}, 32000, {"intermediate_size": 13824}),
    "30B": (LLAMA_1 | {"dim": 6656, "n_heads": 52, "n_layers": 60}, 32000, {"intermediate_size": 17920}),
    "65B": (
        LLAMA_1 | {"dim": 8192, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-05}, 32000,
        {"intermediate_size": 22016, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "2 7B": (LLAMA_1 | {"norm_eps": 1e-05}, 32000, {"intermediate_size": 11008, "max_position_embeddings": 4096}),
    "2 70B": (
        {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80,
         "norm_eps": 1e-05, "vocab_size": -1}, 32000,
        {"intermediate_size": 28672, "max_position_embeddings": 4096, "num_key_value_heads": 8, "eos_token_id": 2},
    ),
    "Code 7B": (
        LLAMA_1 | {"norm_eps": 1e-05, "rope_theta": 1000000}, 32016,
        {"rope_theta": 1000000.0, "max_position_embeddings": 16384, "vocab_size": 32016},
    ),
    "3 8B": (
        LLAMA_3, 128256,
        {"intermediate_size": 14336, "max_position_embeddings": 8192, "rope_theta": 500000.0, "bos_token_id": 128000},
    ),
    "3 70B": (
        LLAMA_3 | {"dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 4096}, 128256,
        {"intermediate_size": 28672},
    ),
    "3.1 8B": (SCALED, 128256, {"max_position_embeddings": 131072, "tie_word_embeddings": False}),
    "3.1 405B": (
        SCALED | {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
        128256, {"intermediate_size": 53248, "eos_token_id": 128001},
    ),
    "3.2 1B": (
        SCALED | {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256}, 128256,
        {"intermediate_size": 8192, "tie_word_embeddings": True, "num_attention_heads": 32},
    ),
    "3.2 3B": (
        SCALED | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256}, 128256,
        {"intermediate_size": 8192},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("params", "vocab", "expected"), MODELS.values(), ids=MODELS)
def test_to_hf_config_matches_published_configs(
    params: dict[str, Any], vocab: int, expected: dict[str, Any]
) -> None:
    config = to_hf_config(params, vocab, is_small_llama_3_2(params))
    assert {key: config[key] for key in expected} == expected
    assert to_hf_config({"model": params}, vocab, False) == config | {"tie_word_embeddings": False}
    renamed_keys = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    }
    assert {key: config[key] for key in renamed_keys} == {
        key: params[meta_key] for key, meta_key in renamed_keys.items()
    }
    assert config["model_type"] == "llama"
    assert FAMILIES["llama"].arch_config(config).max_positions == config["max_position_embeddings"]


def test_to_hf_config_derives_rope_scaling() -> None:
    factors = {
        name: to_hf_config(MODELS[name][0], 128256, False)["rope_scaling"]
        for name in ("3.1 8B", "3.2 1B")
    }
    common_fields = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert factors["3.1 8B"] == common_fields | {"rope_type": "llama3", "factor": 8.0}
    assert factors["3.2 1B"] == common_fields | {"rope_type": "llama3", "factor": 32.0}
    scaled = to_hf_config(SCALED | {"rope_scaling_factor": 16}, 128256, False)["rope_scaling"]
    assert isinstance(scaled, dict)
    assert scaled["factor"] == 16.0
    assert "rope_scaling" not in to_hf_config(LLAMA_3, 128256, False)


BROKEN = {
    "a list": ([], "not a JSON object"),
    "a list one level down": ({"model": []}, "not a JSON object"),
    "another model": (
        LLAMA_1 | {"sliding_window": 4096, "moe": {}},
        "it has moe, sliding_window, which LLaMA",
    ),
    "no width": ({key: value for key, value in LLAMA_1.items() if key != "dim"}, "dim is None"),
    "a negative width": (LLAMA_1 | {"dim": -1}, "dim is -1"),
    "an endless width": (LLAMA_1 | {"dim": 2**40}, "dim is 1099511627776"),
    "a width of True": (LLAMA_1 | {"dim": True}, "dim is True"),
    "a width that heads do not divide": (LLAMA_1 | {"n_heads": 33}, "for each of 33 heads"),
    "heads of odd width": (LLAMA_1 | {"dim": 96}, "for each of 32 heads"),
    "no heads": (LLAMA_1 | {"n_heads": 0}, "n_heads is 0"),
    "key heads that are a text": (LLAMA_1 | {"n_kv_heads": "8"}, "n_kv_heads is '8'"),
    "no norm": (
        {key: value for key, value in LLAMA_1.items() if key != "norm_eps"},
        "norm_eps is None",
    ),
    "an infinite factor": (
        LLAMA_1 | {"ffn_dim_multiplier": float("inf")},
        "ffn_dim_multiplier is inf",
    ),
    "a large factor": (LLAMA_1 | {"ffn_dim_multiplier": 1e300}, "must be at most 1000"),
    "a multiple of nothing": (LLAMA_1 | {"multiple_of": 0}, "multiple_of is 0"),
    "a base below 0": (LLAMA_1 | {"rope_theta": -1.0}, "rope_theta is -1.0"),
}


@pytest.mark.parametrize(("params", "why"), BROKEN.values(), ids=BROKEN)
def test_to_hf_config_rejects_invalid_params(params: Any, why: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        to_hf_config(params, 32000, False)
    assert why in str(caught.value)
