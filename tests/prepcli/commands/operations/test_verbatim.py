"""Checkpoints without a family, and `--verbatim`: the same bytes back from every place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.stores import byte_ranges
from tests.helpers.fork_server import run_python
from tests.helpers.object_server import use_objects
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import (
    StoredTensor,
    orbax_bytes,
    safetensors_bytes,
    write_safetensors,
)
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import RECIPE, write_tokenizer

CONFIG = b'{"model_type":  "unheard_of", "tie_word_embeddings": true, "vocab_size": "any"}\n'
HOSTILE_NAMES = (
    *("", " ", "a b", "x: y", "{layers}", "a.{}.b", "a.*.b", "a.0.b", "a.1.b"),
    *("slash/name", "slash", "slash/0", "slash/0.0", "/slash", "/slash.0", "slash/", "slash//"),
    *("slash.0.w/", "slash.1.w/", "MODEL.weight", "model.weight", "params.params"),
    *("dots..weight.", "007.weight", "~2", "été.漢字"),
)


def random_tensor(seed: int, code: str, itemsize: int, shape: tuple[int, ...]) -> StoredTensor:
    """Return a tensor of random bytes."""
    nbytes = int(np.prod(shape)) * itemsize
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    if code == "BOOL":
        values &= 1
    return code, shape, values.tobytes()


def write_folder(folder: Path, tensors: dict[str, StoredTensor], config: bytes | None) -> None:
    """Write a Hugging Face folder of one file."""
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_bytes(config)


# Dtype code -> bytes per element.
ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def layered_model() -> dict[str, StoredTensor]:
    """Return a model with dense and sparse layers, experts, mixed dtypes, and tensors without elements."""
    tensors: dict[str, StoredTensor] = {}
    for layer in range(5):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.norm.weight"] = random_tensor(layer, "F32", 4, (16,))
        if layer < 2:
            tensors[f"{prefix}.mlp.weight"] = random_tensor(layer, "BF16", 2, (16, 24))
            continue
        for expert in range(4):
            name = f"{prefix}.mlp.experts.{expert}.weight"
            tensors[name] = random_tensor(10 * layer + expert, "F8_E4M3", 1, (16, 24))
            tensors[f"{name}_scale_inv"] = random_tensor(expert, "F32", 4, (1, 1))
    tensors["model.embed.weight"] = random_tensor(1, "BF16", 2, (131, 16))
    tensors["model.empty"] = ("F32", (0, 5), b"")
    tensors["model.scalar"] = random_tensor(2, "I64", 8, ())
    return tensors


RULE = ("--rule", r"re:experts\.weight$=none,mp,fsdp", "--mesh", "1,2,2")
FORMS = [RULE, ("--no-scan", "--mesh", "1,1,4"), ("--compress", "zstd")]


@pytest.mark.parametrize("options", slow_except([(form,) for form in FORMS], [(RULE,)]))
def test_layered_model_round_trips(options: tuple[str, ...]):
    tensors = layered_model()
    write_folder(Path("m"), tensors, CONFIG)
    Path("m/tokenizer.json").write_bytes(b"{ }")
    run_ok("save-init", "./m", *options)
    expected = {name: data for name, (_, _, data) in tensors.items() if data}
    assert orbax_bytes(Path("m-init")) == expected
    run_ok("reshard", "m-init", "--mesh", "1,4,1", "--scan", "--scan-axis", "0", "--out", "other")
    for source in ("m-init", "other"):
        run_ok("verify", source)
        run_ok("verify", source, "./m")
        run_ok("export", source, "--out", f"{source}-hf", "--shard-size", "2KB")
        assert safetensors_bytes(Path(f"{source}-hf")) == tensors
        assert Path(f"{source}-hf/config.json").read_bytes() == CONFIG
        assert Path(f"{source}-hf/tokenizer.json").read_bytes() == b"{ }"
        run_ok("verify", f"{source}-hf", "./m")


def test_hostile_names_round_trip():
    tensors = {
        name: random_tensor(seed, "I16", 2, (seed + 1, 3))
        for seed, name in enumerate(HOSTILE_NAMES)
    }
    for name, other in [("a.1.b", "a.0.b"), ("slash.1.w/", "slash.0.w/")]:
        tensors[name] = random_tensor(99, "I16", 2, tensors[other][1])
    write_folder(Path("m"), tensors, None)
    run_ok("save-init", "./m")
    assert orbax_bytes(Path("m-init")) == {name: tensor[2] for name, tensor in tensors.items()}
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors
    assert not Path("hf/config.json").exists()
    run_ok("verify", "hf", "./m")


@pytest.mark.parametrize("tensors", [{}, {"model.empty": ("F32", (0, 5), b"")}], ids=len)
def test_model_without_elements_is_refused(tensors: dict[str, StoredTensor], capsys: Capture):
    write_folder(Path("m"), tensors, CONFIG)
    error = run_failing(capsys, 1, "save-init", "./m", "--mesh", "1,2,2")
    assert error.startswith("error: ./m cannot be an Orbax checkpoint\n  why: no tensor has ele")
    assert not Path("m-init").exists()


def test_every_dtype_round_trips():
    tensors = {
        f"t.{code}.w": random_tensor(seed, code, itemsize, (3, 4))
        for seed, (code, itemsize) in enumerate(ITEMSIZES.items())
    }
    write_folder(Path("m"), tensors, None)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors


def test_cast_stacks_layers_of_different_float_dtypes():
    tensors = {
        "h.0.w": random_tensor(0, "BF16", 2, (8,)),
        "h.1.w": ("F32", (8,), np.arange(8, dtype=np.float32).tobytes()),
        "h.2.w": random_tensor(2, "I8", 1, (8,)),
    }
    write_folder(Path("m"), tensors, b'{"torch_dtype": "bfloat16"}')
    run_ok("save-init", "./m", "--dtype", "float32")
    manifest = json.loads(Path("m-init/prep-manifest.json").read_text())
    assert manifest["leaves"].keys() == {"params.h.*.w", "params.h.2.w"}
    assert json.loads(Path("m-init/hf/config.json").read_text()) == {"torch_dtype": "float32"}
    run_ok("reshard", "m-init", "--no-scan", "--out", "unstacked")
    run_ok("export", "unstacked", "--out", "hf")
    exported = safetensors_bytes(Path("hf"))
    assert exported["h.1.w"] == tensors["h.1.w"]
    assert exported["h.2.w"] == tensors["h.2.w"]
    widened = np.frombuffer(tensors["h.0.w"][2], np.uint16).astype(np.uint32) << 16
    assert exported["h.0.w"] == ("F32", (8,), widened.tobytes())


def test_manifest_names_the_family_and_the_numbers():
    write_folder(Path("m"), layered_model(), CONFIG)
    run_ok("save-init", "./m")
    manifest = json.loads(Path("m-init/prep-manifest.json").read_text())
    assert (manifest["family"], manifest["rules"]) == ("verbatim", ["auto"])
    assert manifest["stacked"]["model.layers.*.mlp.experts.*.weight"] == [[2, 3, 4], [0, 1, 2, 3]]
    assert manifest["tensors"]["model.empty"]["shape"] == [0, 5]
    assert "params.model.empty" not in manifest["leaves"]


def test_commands_note_untrainable_verbatim_models(capsys: Capture):
    write_folder(Path("m"), layered_model(), CONFIG)
    for command in (
        ["save-init", "./m"],
        ["reshard", "m-init", "--out", "r"],
        ["export", "m-init"],
    ):
        capsys.readouterr()
        assert main([*command, "--progress", "none"]) == 0
        assert CANNOT_TRAIN in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("save-init", "./m", "--no-verbatim"),
        ("export", "m-init", "--no-verbatim"),
        ("pad-vocab", "./m"),
        ("save-init", "./m", "--pad-vocab", "8"),
        ("save-init", "./m", "--untie"),
        ("generate", "m-init", "--prompt", "x"),
    ],
    ids=" ".join,
)
def test_unsupported_requests_are_refused(capsys: Capture, words: tuple[str, ...]):
    write_folder(Path("m"), layered_model(), CONFIG)
    run_ok("save-init", "./m")
    code = 2 if "--pad-vocab" in words or "--untie" in words else 1
    assert run_failing(capsys, code, *words).count("error:") == 1


def test_experts_are_split_over_fsdp_and_layers_are_not():
    tensors: dict[str, StoredTensor] = {}
    for layer in range(2):
        for expert in range(4):
            name = f"h.{layer}.experts.{expert}.w"
            tensors[name] = random_tensor(expert, "F32", 4, (512, 1024))
    write_folder(Path("m"), tensors, None)
    run_ok("save-init", "./m", "--mesh", "1,2,2", "--out", "init")
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    leaf = manifest["leaves"]["params.h.*.experts.*.w"]
    assert (leaf["shape"], leaf["chunk"]) == ([2, 4, 512, 1024], [1, 1, 512, 512])
    assert orbax_bytes(Path("init")) == {name: tensor[2] for name, tensor in tensors.items()}


def test_output_with_too_many_chunks_is_refused(capsys: Capture, monkeypatch: MonkeyPatch):
    write_folder(Path("m"), layered_model(), CONFIG)
    monkeypatch.setattr("prepcli.commands.operations.conversion.MAX_ENTRIES", 10)
    assert "would have 33 chunks" in run_failing(capsys, 2, "save-init", "./m")
    assert not Path("m-init").exists()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["w{0}.weight", "layers.{0}.weight"])
def test_many_tensors_are_planned_in_bounded_memory(pattern: str):
    tensors: dict[str, StoredTensor] = {}
    for number in range(200_000):
        tensors[pattern.format(number)] = ("U8", (2, 2), b"abcd")
    write_folder(Path("m"), tensors, CONFIG)
    script = (
        "import resource, prepcli\n"
        "prepcli.save_init('./m', mesh='1,64,4', dry_run=True)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    process = run_python(script)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 1200 << 10


def test_inspect_compares_the_item_with_its_source(capsys: Capture):
    write_folder(Path("m"), layered_model(), CONFIG)
    run_ok("save-init", "./m")
    for names in [("m-init", "./m"), ("./m", "m-init")]:
        assert run_json(capsys, "inspect", names[0], "--diff", names[1])["differences"] == []


# The option --verbatim for models with a family, and outputs from before their family was known


@pytest.fixture
def tensors() -> dict[str, StoredTensor]:
    """Write a LLaMA model to `m` and its verbatim init to `old`, and return its tensors."""
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--verbatim", "--mesh", "1,2,2", "--out", "old")
    return safetensors_bytes(Path("m"))


def test_old_output_stays_verbatim_when_its_family_is_known(tensors: dict[str, StoredTensor]):
    expected = {name: data for name, (_, _, data) in tensors.items()}
    assert orbax_bytes(Path("old")) == expected
    run_ok("reshard", "old", "--mesh", "1,4,1", "--out", "new")
    assert json.loads(Path("new/prep-manifest.json").read_text())["family"] == "verbatim"
    assert orbax_bytes(Path("new")) == expected
    for source in ("old", "new"):
        run_ok("export", source, "--out", f"{source}-hf")
        assert safetensors_bytes(Path(f"{source}-hf")) == tensors


def test_export_of_an_old_output_trains_with_its_family(tensors: dict[str, StoredTensor]):
    run_ok("export", "old", "--out", "hf")
    run_ok("save-init", "./hf", "--no-verbatim", "--mesh", "1,2,1", "--out", "init")
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert (manifest["family"], manifest["rules"]) == ("llama", [])
    assert "params.layers.attn.q.weight" in manifest["leaves"]
    run_ok("export", "init", "--out", "again")
    assert safetensors_bytes(Path("again")) == tensors


def test_name_without_the_prefix_is_compared_as_stored(tensors: dict[str, StoredTensor]):
    renamed = {name.replace("model.norm.", "norm."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    Path("mixed").mkdir()
    write_safetensors(Path("mixed/model.safetensors"), renamed)
    shutil.copy("m/config.json", "mixed")
    run_ok("save-init", "./mixed", "--verbatim", "--out", "init")
    run_ok("verify", "init", "./mixed")


@pytest.mark.parametrize(("a", "b"), [("old", "init"), ("hf", "m")])
def test_verbatim_and_family_outputs_are_equal(tensors: dict[str, StoredTensor], a: str, b: str):
    run_ok("save-init", "./m", "--out", "init")
    run_ok("export", "old", "--out", "hf")
    assert main(["verify", f"./{a}", f"./{b}", "-q"]) == 0
    assert prep.verify(f"./{a}", f"./{b}").tensors == len(tensors)


@pytest.mark.usefixtures("tensors")
def test_difference_between_verbatim_and_family_is_found(capsys: Capture):
    path = next(Path("m").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    assert main(["verify", "old", "./m", "-q"]) == 1
    assert "1 of 30 tensors" in capsys.readouterr().err


def test_refusal_of_a_family_hints_at_verbatim(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA, attention_bias=True)
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps(config | {"attention_bias": False}))
    assert "`--verbatim`" in run_failing(capsys, 1, "save-init", "./m")
    run_ok("save-init", "./m", "--verbatim")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("m"))


@pytest.mark.parametrize("source", ["old", "old-hf"])
def test_verbatim_checkpoint_is_named_in_json(
    capsys: Capture, tensors: dict[str, StoredTensor], source: str
):
    run_ok("export", "old", "--out", "old-hf")
    assert run_json(capsys, "inspect", source)["source"]["family"] == "verbatim"


def test_train_refuses_a_verbatim_checkpoint(capsys: Capture, tensors: dict[str, StoredTensor]):
    Path("text.txt").write_text("some text\n" * 100)
    recipe = RECIPE.replace('"tiny-init"', '"old"').replace("[data]", '[data]\ntokenizer = "words"')
    Path("recipe.toml").write_text(recipe)
    Path("words").mkdir()
    write_tokenizer(Path("words"))
    error = run_failing(capsys, 1, "train", "recipe.toml")
    assert error.count("error:") == 1
    assert CANNOT_TRAIN in error


def test_names_that_differ_in_case_only_convert():
    tensors: dict[str, StoredTensor] = {
        "Model.w": ("U8", (3,), b"abc"),
        "model.w": ("U8", (3,), b"xyz"),
    }
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors


def test_tensor_in_two_files_is_rejected(capsys: Capture):
    Path("m").mkdir()
    for number in (1, 2):
        path = Path(f"m/model-0000{number}-of-00002.safetensors")
        write_safetensors(path, {"twice": ("U8", (1,), b"a")})
    assert "twice" in run_failing(capsys, 1, "save-init", "./m")
    assert not Path("m-init").exists()


def test_verbatim_without_effect_is_an_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--out", "init")
    for words in (("reshard", "init"), ("export", "init"), ("verify", "init")):
        assert "`--verbatim` has no effect" in run_failing(capsys, 2, *words, "--verbatim")


# Large checkpoints without a family in a bucket, and code beside the weights


SHORT_CONFIG = b'{"model_type": "unheard_of"}\n'


@pytest.fixture
def large_tensors() -> dict[str, StoredTensor]:
    """Write a model `m` of 3 MB with code to the working folder, and return its large_tensors."""
    rng = np.random.default_rng(0)
    large_tensors: dict[str, StoredTensor] = {"bias": ("F16", (7,), rng.bytes(14))}
    for layer in range(3):
        large_tensors[f"h.{layer}.w"] = ("BF16", (512, 1024), rng.bytes(1 << 20))
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), large_tensors)
    Path("m/config.json").write_bytes(SHORT_CONFIG)
    Path("m/modeling.py").write_bytes(b"x = 1\n")
    Path("m/tokenizer.json").write_bytes(b"{}")
    return large_tensors


def folder_files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_bucket_is_source_and_target(
    large_tensors: dict[str, StoredTensor], monkeypatch: MonkeyPatch
):
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    objects = {f"bucket/m/{name}": data for name, data in folder_files("m").items()}
    with use_objects(monkeypatch, objects):
        run_ok("save-init", "gs://bucket/m", "--mesh", "1,1,2", "--out", "gs://bucket/init")
        run_ok("verify", "gs://bucket/init", "./m")
        run_ok("export", "gs://bucket/init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == large_tensors
    assert Path("hf/config.json").read_bytes() == SHORT_CONFIG


@pytest.mark.usefixtures("large_tensors")
def test_code_is_listed_and_copied_on_request(capsys: Capture):
    assert main(["save-init", "./m", "--progress", "none"]) == 0
    assert "not copied: modeling.py (`--copy GLOB` copies them)" in capsys.readouterr().err
    assert not Path("m-init/hf/modeling.py").exists()
    run_ok("save-init", "./m", "--copy", "*.py", "--out", "with-code")
    assert Path("with-code/hf/modeling.py").read_bytes() == b"x = 1\n"
    assert main(["save-init", "./m", "--copy", "*.txt", "--out", "other"]) == 2
    assert "`--copy '*.txt'` matches no file" in capsys.readouterr().err
