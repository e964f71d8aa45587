"""Synthetic checkpoints of published sizes, and plans of them with few layers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.models import BLOCK_NBYTES, FREE_BITS, main, tensor_entries, write_model
from bench.published import PUBLISHED, published_config
from bench.sizes import SizeRow, largest_aliases, sizes_text
from prepcli.algebra.axis_map import bind_row
from prepcli.commands.cli.main import main as prep_main
from prepcli.commands.testing.tiny_model import tensor_shapes
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import family_of
from prepcli.planning.tensors import itemsize
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, ALIASES_BY_NAME
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import read_tensors

NARROW = {"vocab_size": 131, "hidden_size": 32, "max_position_embeddings": 64}
GPT_NEO = published_config("gpt-neo-125M", layers=3, changes={**NARROW, "num_heads": 4})
LLAMA = published_config(
    "llama-3-8b",
    layers=2,
    changes={**NARROW, "intermediate_size": 48, "num_attention_heads": 8, "eos_token_id": 2},
)


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes from the table of the family alone."""
    family = family_of(config)
    bound_rows = [
        bind_row(row, family.sizes(config)) for row in parameter_rows(family, config).values()
    ]
    shapes = {name: row.source_shape for row in bound_rows for name, _ in row.tensors()}
    if family.is_tied(config):
        del shapes[family.tying.head_tensor]
    return {
        name if name in family.unprefixed else family.prefix + name: shape
        for name, shape in shapes.items()
    }


def test_published_configs_match_aliases() -> None:
    assert list(PUBLISHED) == [alias.name for alias in ALIASES]


def test_published_config_sizes_match_aliases() -> None:
    for name in PUBLISHED:
        alias, config = ALIASES_BY_NAME[name], published_config(name)
        assert (
            sum(math.prod(shape) for _, _, shape, _ in tensor_entries(config)) == alias.parameters
        )
        assert sum(nbytes for *_, nbytes in tensor_entries(config)) == alias.nbytes, name
        assert (config["model_type"], config["vocab_size"]) == (alias.family, alias.vocab), name


@pytest.mark.slow
@pytest.mark.parametrize("name", largest_aliases())
def test_published_config_sizes_match_transformers(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shapes = tensor_shapes(published_config(name))
    assert sum(map(math.prod, shapes.values())) == ALIASES_BY_NAME[name].parameters


@pytest.mark.parametrize(
    ("layers", "attention"), [(1, [[["global"], 1]]), (4, [[["global", "local"], 2]])]
)
def test_gpt_neo_attention_types_follow_the_depth(layers: int, attention: list[object]) -> None:
    assert published_config("gpt-neo-1.3B", layers=layers)["attention_types"] == attention


@pytest.mark.parametrize("config", [GPT_NEO, LLAMA, GPT_NEO | {"tie_word_embeddings": False}])
def test_write_model_writes_names_and_shapes_of_the_config(
    config: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", config, shard_nbytes=30_000)
    assert {
        name: value.shape for name, value in read_tensors(tmp_path / "model").items()
    } == shapes_of(config)
    source = open_source(locate(str(tmp_path / "model")))
    assert len(source.files) > 1
    assert source.vocabulary().true_size == 131


@pytest.mark.parametrize("dtype", FREE_BITS)
def test_write_model_values_are_finite_and_distinct(dtype: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    write_model(tmp_path / "model", GPT_NEO | {"torch_dtype": dtype})
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file:
        assert len(file.keys()) == len(tensor_entries(GPT_NEO))
    tensors = read_tensors(tmp_path / "model")
    for value in tensors.values():
        assert value.dtype.name == dtype
        assert np.isfinite(value.astype(np.float64)).all()
    for first, second in itertools.combinations(tensors.values(), 2):
        count = min(first.size, second.size)
        assert first.ravel()[:count].tobytes() != second.ravel()[:count].tobytes()


def test_blocks_of_a_tensor_differ(tmp_path: Path) -> None:
    config = GPT_NEO | {"vocab_size": 3 * BLOCK_NBYTES // (32 * itemsize("float32"))}
    write_model(tmp_path / "model", config)
    words = (
        read_tensors(tmp_path / "model")["transformer.wte.weight"].view(np.uint64).reshape(3, -1)
    )
    for first, second in itertools.combinations(words, 2):
        assert (first != second).all()


def test_write_model_is_deterministic(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / name, LLAMA, shard_nbytes=30_000)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_sparse_model_takes_no_disk_space(tmp_path: Path) -> None:
    main(["llama-13b", str(tmp_path / "model"), "--sparse"])
    source = open_source(locate(str(tmp_path / "model")))
    assert sum(tensor.nbytes for tensor in source.tensors) == ALIASES_BY_NAME["llama-13b"].nbytes
    files = [path.stat() for path in (tmp_path / "model").glob("*.safetensors")]
    assert len(files) == 6
    assert (
        sum(file.st_blocks * 512 for file in files) < 1 << 20 < sum(file.st_size for file in files)
    )


def test_tokenizer_size_matches_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_model(tmp_path / "model", GPT_NEO)
    assert (
        tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).get_vocab_size()
        == 131
    )


def test_main_overrides_config(tmp_path: Path) -> None:
    options = [
        "--layers",
        "1",
        "--dtype",
        "bfloat16",
        "--set",
        "hidden_size=24",
        "--set",
        "vocab_size=7",
    ]
    main(["gpt-neo-125M", str(tmp_path / "model"), *options, "--shard-gb", "0.00005"])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_layers"], config["torch_dtype"], config["hidden_size"]) == (
        1,
        "bfloat16",
        24,
    )
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--set", "layers"], "is not KEY=JSON"),
        (["--set", "hidden_size=0"], "hidden_size is 0"),
        ([], "exists"),
    ],
)
def test_main_rejects_invalid_options(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["llama-7b", str(tmp_path), "--sparse", *options])
    assert why in capsys.readouterr().err


LAYERS = 2  # layers of each model; widths are as published


@pytest.mark.parametrize("name", slow_except(PUBLISHED, list(PUBLISHED)[::9]))
def test_every_alias_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = published_config(name, layers=LAYERS)
    nbytes = write_model(tmp_path / "m", config, sparse=True)
    assert (
        prep_main(["save-init", str(tmp_path / "m"), "--pad-vocab", "8", "--dry-run", "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (
        result["accounting"]["tensors"]
        == result["accounting"]["used"]
        == len(tensor_entries(config))
    )
    assert result["source"]["bytes"] >= nbytes
    assert family_of(config).arch_config(config).sliding_windows


def test_largest_aliases_cover_every_family_with_aliases() -> None:
    published = {published_config(name)["model_type"] for name in largest_aliases()}
    assert published == {*ALIAS_FAMILIES}
    assert "llama-3.1-405b" in largest_aliases()


def test_sizes_text_has_a_line_per_model() -> None:
    line = sizes_text(
        [SizeRow("mistral-7b", 14_483_464_192, 291, 12, 4000, 1.26, 3 << 20)]
    ).splitlines()[-1]
    assert line.split() == [
        "mistral-7b",
        "mistral",
        "7,241,732,096",
        "14.5",
        "291",
        "12",
        "4,000",
        "1.3",
        "3",
    ]
