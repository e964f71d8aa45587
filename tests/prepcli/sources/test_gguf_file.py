"""GGUF files as sources, compared with the loader of transformers, and repositories of them on a fake hub."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.core.errors import DamagedError, PrepError
from tests.helpers.fork_server import run_python
from tests.helpers.gguf_files import CONFIGS, GPT_OSS, MIXTRAL, make_gguf
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import checkpoint_tensors, read_tensors

gguf = lazy_module("gguf")
torch = lazy_module("torch")
transformers = lazy_module("transformers")
gguf_loading = lazy_module("transformers.modeling_gguf_pytorch_utils")
TYPES = ("Q8_0", "Q4_0", "F16", "BF16", "F32", "Q4_K", "Q6_K")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(**options: Any) -> dict[str, np.ndarray]:
    """Decode `m.gguf`, and return the tensors of an export."""
    prep.save_init("./m.gguf", "init", quantized="dequantize", **options)
    prep.export("init", "exported")
    return read_tensors(Path("exported"))


def transformers_tensors() -> dict[str, np.ndarray]:
    """Return the tensors that transformers loads from `m.gguf`, with one tensor per expert."""
    parsed = gguf_loading.load_gguf_checkpoint("m.gguf", return_tensors=False)["config"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            # The default of Phi-3 is a token beyond this vocabulary.
            transformers.AutoConfig.for_model(**{**parsed, "pad_token_id": None})
        )
    loaded = gguf_loading.load_gguf_checkpoint("m.gguf", return_tensors=True, model_to_load=model)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in loaded["tensors"].items():
        array = tensor.numpy()
        if not name.endswith((".gate_up_proj", ".experts.down_proj")):
            tensors[name] = array
            continue
        prefix = name.rpartition(".")[0]
        for expert, matrix in enumerate(array):
            if name.endswith("gate_up_proj"):
                gate, up = np.split(matrix, 2)
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up
            else:
                tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix
    return tensors


CASES = [(name, kind) for name in CONFIGS for kind in TYPES]
FAST = [(name, "Q8_0") for name in CONFIGS] + [("llama", kind) for kind in ("F32", "Q4_K")]


@pytest.mark.parametrize(("architecture", "type_name"), slow_except(CASES, [*dict.fromkeys(FAST)]))
def test_values_equal_transformers(architecture: str, type_name: str):
    if architecture == "gpt2" and type_name in ("Q4_K", "Q6_K"):
        pytest.skip("random blocks may overflow")
    make_gguf(Path("m.gguf"), architecture, type_name)
    tensors = convert(dtype="float32")
    expected = transformers_tensors()
    assert {*tensors} == {*expected}
    for name, array in expected.items():
        assert tensors[name].shape == array.shape, name
        assert np.array_equal(tensors[name], array.astype(np.float32)), name


@pytest.mark.parametrize(
    "architecture", slow_except(CONFIGS, ["llama", "qwen3moe", "gemma3", "gpt2"])
)
def test_config_equals_transformers(architecture: str):
    make_gguf(Path("m.gguf"), architecture)
    convert()
    config = transformers.AutoConfig.from_pretrained("exported")
    parsed = gguf_loading.load_gguf_checkpoint("m.gguf")["config"]
    expected = transformers.AutoConfig.for_model(**parsed)
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "model_type")
    for field in (*fields, "tie_word_embeddings"):
        assert getattr(config, field) == getattr(expected, field), field
    original = CONFIGS[architecture]
    fields = ("vocab_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "intermediate_size")
    for field in (*fields, "max_position_embeddings", "n_positions"):
        if field in original:
            assert getattr(config, field) == original[field], field


def test_default_is_bfloat16():
    make_gguf(Path("m.gguf"), "llama", "Q4_0")
    tensors = convert(mesh="1,2,2")
    expected = transformers_tensors()
    for name, array in expected.items():
        assert np.array_equal(tensors[name], array.astype(ml_dtypes.bfloat16)), name


def test_config_option_replaces_metadata():
    make_gguf(Path("m.gguf"), "llama")
    Path("c").mkdir()
    config = {**CONFIGS["llama"], "rope_theta": 7.0, "tie_word_embeddings": False}
    Path("c/config.json").write_text(json.dumps(config))
    convert(config="c")
    assert json.loads(Path("exported/config.json").read_text())["rope_theta"] == 7.0


def rewrite(pattern: bytes, replacement: bytes) -> None:
    """Replace bytes of `m.gguf` by as many others."""
    content = Path("m.gguf").read_bytes()
    changed = re.sub(re.escape(pattern), replacement, content, count=1)
    assert len(changed) == len(content) != 0
    assert changed != content
    Path("m.gguf").write_bytes(changed)


@pytest.mark.parametrize(
    ("pattern", "replacement", "error", "message"),
    [
        (b"llama", b"xlama", PrepError, "architecture 'xlama'"),
        (b"token_embd.weight", b"token_emxx.weight", DamagedError, "no `token_embd.weight`"),
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", PrepError, "blk.1.ffn_xx.weight"),
    ],
)
def test_unknown_architecture_or_tensor_is_named(
    pattern: bytes, replacement: bytes, error: type[PrepError], message: str
):
    make_gguf(Path("m.gguf"), "llama")
    rewrite(pattern, replacement)
    with pytest.raises(error, match=re.escape(message)):
        convert()
    assert not Path("init").exists()


def test_scaled_rotary_embedding_requires_config():
    make_gguf(Path("m.gguf"), "llama", extra={"rope_freqs.weight": np.ones(32, np.float32)})
    with pytest.raises(PrepError, match="factors of a scaled rotary embedding"):
        convert()
    assert not Path("init").exists()


def test_sliding_window_0_is_no_window():
    # Files of Phi-4 have this value.
    make_gguf(Path("m.gguf"), "phi3", config={**CONFIGS["phi3"], "sliding_window": 0})
    convert()
    assert json.loads(Path("exported/config.json").read_text())["sliding_window"] is None
    assert transformers.AutoConfig.from_pretrained("exported").sliding_window is None


def test_partial_rotary_embedding_of_phi3_requires_config():
    make_gguf(Path("m.gguf"), "phi3", add=lambda writer: writer.add_rope_dimension_count(64))
    convert()
    make_gguf(Path("m.gguf"), "phi3", add=lambda writer: writer.add_rope_dimension_count(48))
    with pytest.raises(PrepError, match="rotates 48 of the 64 values") as caught:
        prep.save_init("./m.gguf", "other", quantized="dequantize")
    assert 'config="FOLDER"' in str(caught.value.hint)


def test_values_per_layer_require_config():
    key = "gemma2.attn_logit_softcapping"
    make_gguf(Path("m.gguf"), "gemma2", add=lambda writer: writer.add_array(key, [50.0, 40.0]))
    with pytest.raises(PrepError, match=f"per-layer values of `{key}` are not") as caught:
        convert()
    assert not isinstance(caught.value, DamagedError)
    assert 'config="FOLDER"' in str(caught.value.hint)


def test_quantised_bias_of_heads_is_refused():
    quant_type = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quantize(np.ones(256, np.float32), quant_type)

    def add_bias(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_q.bias", blocks, raw_dtype=quant_type)
        for module, rows in (("attn_k", 128), ("attn_v", 128), ("attn_output", 256)):
            writer.add_tensor(f"blk.0.{module}.bias", np.ones(rows, np.float32))

    make_gguf(Path("m.gguf"), "llama", add=add_bias)
    with pytest.raises(PrepError, match=r"type Q8_0 of `blk\.0\.attn_q\.bias` is not"):
        convert()


def logits(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits that transformers computes."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{**config, "pad_token_id": None})
    )
    state = {name: torch.tensor(array) for name, array in tensors.items()}
    model.load_state_dict(state, strict=False)
    return model.eval()(torch.arange(3, 19)[None]).logits.detach().numpy()


@pytest.mark.parametrize(
    "fields",
    [pytest.param(("attention_bias", "mlp_bias"), marks=pytest.mark.slow), ("attention_bias",)],
)
def test_biases_of_llama_are_in_the_config(fields: tuple[str, ...]):
    original = CONFIGS["llama"] | dict.fromkeys(fields, True)
    make_gguf(Path("m.gguf"), "llama", "F32", config=original)
    tensors = convert(dtype="float32")
    config = json.loads(Path("exported/config.json").read_text())
    assert [field for field in ("attention_bias", "mlp_bias") if config.get(field)] == [*fields]
    expected = checkpoint_tensors(original, "float32", False, False)
    assert abs(logits(config, tensors) - logits(original, expected)).max() <= 2e-5


def test_biases_of_some_modules_are_refused():
    biases = {f"blk.{layer}.attn_q.bias": np.ones(256, np.float32) for layer in range(2)}
    make_gguf(Path("m.gguf"), "llama", extra=biases)
    with pytest.raises(PrepError, match=r"the biases of m\.gguf are not supported") as caught:
        convert()
    assert "it has `blk.attn_q.bias` and no `blk.attn_k.bias`" in caught.value.why
    assert str(caught.value.hint) == "use the safetensors files that it was converted from"


def test_hint_for_biases_does_not_drop_them():
    biases = {"blk.0.attn_q.bias": np.ones(256, np.float32)}
    make_gguf(Path("m.gguf"), "qwen3", extra=biases)
    with pytest.raises(PrepError, match="not part of family qwen3") as caught:
        convert()
    assert "--drop" not in str(caught.value.hint)
    assert "`attention_bias`" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("architecture", "changes", "divisor"),
    slow_except(
        [
            # The width of a head, which is 256 in the 2B and 9B models.
            ("gemma2", {}, 64),
            ("gemma2", {"head_dim": 128}, 128),
            ("gemma3", {"head_dim": 128}, 128),
            # 4,608 / 32 and 5,376 / 32 in the published 27B models.
            ("gemma2", {"num_hidden_layers": 46, "head_dim": 32}, 256 // 4),
            ("gemma3", {"num_hidden_layers": 62, "head_dim": 32}, 256 // 4),
        ],
        [("gemma2", {}, 64), ("gemma3", {"head_dim": 128}, 128)],
    ),
)
def test_gemma_divides_queries_as_llama_cpp(
    architecture: str, changes: dict[str, int], divisor: int
):
    config = CONFIGS[architecture] | changes
    make_gguf(Path("m.gguf"), architecture, config=config, layers=config["num_hidden_layers"])
    convert()
    config = transformers.AutoConfig.from_pretrained("exported")
    assert config.query_pre_attn_scalar == divisor


def test_gemma_without_its_width_requires_config():
    make_gguf(Path("m.gguf"), "gemma2")
    rewrite(b"gemma2.embedding_length", b"gemma2.embedding_lengtx")
    with pytest.raises(PrepError, match="is not complete") as caught:
        convert()
    assert "the scale of queries" in caught.value.why
    assert 'config="FOLDER"' in str(caught.value.hint)


def test_type_that_is_not_decoded_is_named():
    make_gguf(Path("m.gguf"), "llama", "IQ4_NL")
    with pytest.raises(PrepError, match=r"type IQ4_NL of `token_embd\.weight` is not"):
        convert()


def test_number_of_experts_is_limited():
    experts = {"blk.2.ffn_up_exps.weight": np.zeros((20_000, 1, 1), np.float32)}
    make_gguf(Path("m.gguf"), "qwen3moe", extra=experts)
    with pytest.raises(DamagedError, match="has 20,000 experts"):
        convert()


@pytest.mark.slow
def test_experts_of_mixtral_are_its_matrices():
    make_gguf(Path("m.gguf"), "llama", "F32", config=MIXTRAL)
    tensors = convert(dtype="float32")
    expected = checkpoint_tensors(MIXTRAL, "float32", False, False)
    assert {*tensors} == {*expected}
    for name, array in expected.items():
        assert np.array_equal(tensors[name], array), name
    config = json.loads(Path("exported/config.json").read_text())
    assert config["model_type"] == "mixtral"
    for field in ("num_local_experts", "num_experts_per_tok", "num_key_value_heads"):
        assert config[field] == MIXTRAL[field]


def round_to_mxfp4(array: np.ndarray) -> np.ndarray:
    """Return the values of a matrix, or of transposed experts, after quantisation by gguf."""
    stored = array.swapaxes(1, 2) if array.ndim == 3 else array
    blocks = gguf.quantize(np.ascontiguousarray(stored), gguf.GGMLQuantizationType.MXFP4)
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4).reshape(stored.shape)
    return values.swapaxes(1, 2) if array.ndim == 3 else values


@pytest.mark.parametrize("type_name", slow_except(["F32", "MXFP4"], ["F32"]))
def test_experts_of_gpt_oss_are_joined_and_transposed(type_name: str):
    make_gguf(Path("m.gguf"), "gpt-oss", type_name, config=GPT_OSS)
    Path("c").mkdir()
    Path("c/config.json").write_text(json.dumps(GPT_OSS))
    tensors = convert(dtype="float32", config="c")
    expected = checkpoint_tensors(GPT_OSS, "float32", False, False)
    assert {*tensors} == {*expected}
    for name, array in expected.items():
        is_rounded = type_name == "MXFP4" and array.ndim > 1 and not name.endswith("_bias")
        values = round_to_mxfp4(array) if is_rounded else array
        assert np.array_equal(tensors[name], values), name
    prep.save_init("./m.gguf", "rounded", quantized="dequantize", config="c", mesh="1,2,1")
    assert prep.verify("rounded", "./m.gguf", config="c")
    inspection = prep.inspect("./m.gguf", config="c")
    assert {tensor.name: tensor.shape for tensor in inspection.tensors} == {
        name: array.shape for name, array in expected.items()
    }


def part_names() -> list[str]:
    return sorted(path.name for path in Path().glob("m-*.gguf"))


def test_parts_are_one_model():
    make_gguf(Path("m.gguf"), "llama")
    expected = convert()
    make_gguf(Path("m.gguf"), "llama", tensors_per_part=7)
    names = part_names()
    assert len(names) > 2
    # Any part names the model.
    for number in (0, 1):
        prep.save_init(f"./{names[number]}", f"init{number}", quantized="dequantize")
        prep.export(f"init{number}", f"exported{number}")
        tensors = read_tensors(Path(f"exported{number}"))
        assert {*tensors} == {*expected}
        for name, array in expected.items():
            assert tensors[name].tobytes() == array.tobytes(), name


def test_missing_part_is_named():
    make_gguf(Path("m.gguf"), "llama", tensors_per_part=7)
    first, second, *_ = part_names()
    Path(second).unlink()
    with pytest.raises(PrepError, match=re.escape(f"{second} is missing")):
        prep.save_init(f"./{first}", "init", quantized="dequantize")


def test_gguf_parts_with_swapped_names_are_refused():
    make_gguf(Path("m.gguf"), "llama", tensors_per_part=7)
    first, second, third, *_ = part_names()
    Path(second).rename("x.gguf")
    Path(third).rename(second)
    Path("x.gguf").rename(third)
    with pytest.raises(DamagedError, match=re.escape(f"{second} is not part 2 of")):
        prep.save_init(f"./{first}", "init", quantized="dequantize")


@pytest.mark.parametrize("architecture", slow_except(["llama", "qwen3moe", "gpt2"], ["qwen3moe"]))
def test_inspect_lists_decoded_tensors(architecture: str, capsys: pytest.CaptureFixture[str]):
    make_gguf(Path("m.gguf"), architecture)
    tensors = convert()
    inspection = prep.inspect("./m.gguf")
    assert inspection.format == "gguf"
    listed = {tensor.name: (tensor.shape, tensor.dtype) for tensor in inspection.tensors}
    assert listed == {name: (array.shape, "bfloat16") for name, array in tensors.items()}
    run_ok("inspect", "./m.gguf")
    assert "quantised weights (gguf), bfloat16 when decoded" in capsys.readouterr().out


def test_offsets_are_computed_once_per_dtype(monkeypatch: pytest.MonkeyPatch):
    # Computed for each tensor, they took seconds with thousands of weights.
    num_offsets = 0
    accumulate = itertools.accumulate

    def count_offsets(sizes: Iterator[int], *, initial: int) -> Iterator[int]:
        nonlocal num_offsets
        num_offsets += 1
        return accumulate(sizes, initial=initial)

    make_gguf(Path("m.gguf"), "llama")
    monkeypatch.setattr(itertools, "accumulate", count_offsets)
    prep.inspect("./m.gguf")
    # Of the blocks, and of the values in bfloat16.
    assert num_offsets == 2


def test_inspect_computes_statistics_of_decoded_values(capsys: pytest.CaptureFixture[str]):
    make_gguf(Path("m.gguf"), "llama")
    values = convert()["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    run_ok("inspect", "./m.gguf", "*layers.1.mlp.up*", "--stats", "--json")
    (tensor,) = json.loads(capsys.readouterr().out)["tensors"]
    assert tensor["stats"]["max"] == values.max()


def test_gguf_without_option_is_refused():
    make_gguf(Path("m.gguf"), "llama")
    with pytest.raises(PrepError, match="is in GGUF format"):
        prep.save_init("./m.gguf", "init")


gguf = lazy_module("gguf")
SCRIPT = "import sys; from prepcli.commands.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> FakeRepo:
    """Return a repository with a file, and with a model in parts in a folder."""
    folder = tmp_path_factory.mktemp("gguf")
    make_gguf(folder / "m-Q8.gguf", "llama")
    make_gguf(folder / "p.gguf", "llama", tensors_per_part=7)
    files = {"m-Q8.gguf": (folder / "m-Q8.gguf").read_bytes()}
    for path in folder.glob("p-*.gguf"):
        files[f"parts/{path.name}"] = path.read_bytes()
    return FakeRepo(files)


def run(repo: FakeRepo, work: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Run prep with a fake hub. Return its exit code, its messages and the files that it has requested."""
    with serve_hub({"o/m": repo}) as hub:
        result = run_python(SCRIPT, *arguments, env=hub.environment(work / "home"), cwd=work)
        requests = [request for request in hub.requests if ".gguf" in request]
    return result.returncode, result.stderr, requests


def test_file_of_a_repository_is_converted(repo: FakeRepo, tmp_path: Path):
    arguments = ("save-init", "o/m/m-Q8.gguf", "--quantized", "dequantize")
    code, error, requests = run(repo, tmp_path, *arguments)
    assert code == 0, error
    assert (tmp_path / "m-Q8-init/prep-manifest.json").exists()
    assert not any("parts" in request for request in requests)
    # The cache has the file.
    code, error, requests = run(repo, tmp_path, *arguments, "--out", "again", "--offline")
    assert code == 0, error
    assert not requests


@pytest.mark.slow
def test_all_parts_in_a_folder_are_downloaded(repo: FakeRepo, tmp_path: Path):
    name = next(name for name in repo.files if "-00001-of-" in name)
    code, error, requests = run(
        repo, tmp_path, "save-init", f"o/m/{name}", "--quantized", "dequantize", "--out", "init"
    )
    assert code == 0, error
    fetched = {request.rpartition("/")[2] for request in requests}
    assert fetched == {Path(name).name for name in repo.files if "parts" in name}


def test_unknown_file_is_an_error_that_lists_the_others(repo: FakeRepo, tmp_path: Path):
    code, error, _ = run(repo, tmp_path, "save-init", "o/m/m-Q4.gguf", "--quantized", "dequantize")
    assert code == 1
    assert "o/m has no m-Q4.gguf" in error
    assert "m-Q8.gguf" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_except(["m-Q8.gguf", "parts/p-00001-of"], ["parts/p-00001-of"])
)
def test_streamed_file_has_the_bytes_of_a_downloaded_one(repo: FakeRepo, tmp_path: Path, name: str):
    file = next(file for file in repo.files if file.startswith(name))
    for out, more in (("streamed", ["--stream"]), ("downloaded", [])):
        arguments = ("save-init", f"o/m/{file}", "--quantized", "dequantize", "--storage", "files")
        code, error, requests = run(repo, tmp_path, *arguments, "--out", out, *more)
        assert code == 0, error
        assert requests
        assert bool(more) == (not list((tmp_path / "home").rglob("*.gguf")))
    chunks = [path for path in (tmp_path / "downloaded").rglob("0*") if path.is_file()]
    assert chunks
    for path in chunks:
        streamed = tmp_path / "streamed" / path.relative_to(tmp_path / "downloaded")
        assert streamed.read_bytes() == path.read_bytes()


def test_local_folder_with_the_owners_name_means_a_path(tmp_path: Path):
    (tmp_path / "o").mkdir()
    code, error, _ = run(FakeRepo(), tmp_path, "inspect", "o/m/x.gguf")
    assert code == 2
    assert "more than one `/`" in error
