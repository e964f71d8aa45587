"""`prep verify --chain` compares the recorded digests of each output with those of its source."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import xxhash

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE, UsageError
from prepcli.stores import byte_ranges
from tests.helpers.adapters import make_adapter
from tests.helpers.damage import flip_used_bit
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.hub_server import COMMIT, FakeRepo, serve_hub
from tests.helpers.manifests import changed_manifest
from tests.helpers.object_server import use_objects
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.range_server import serve_ranges
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.training_folder import make_training_folder

STEP = "runs/recipe/3"
FOLDERS = ["tiny", "padded", "init", STEP, "hf", "runs/lora/2", "adapter", "merged"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a chain of every command: pad, init, steps, export, adapter and merge."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_training_folder()
        shutil.rmtree("tiny-init")
        prep.pad_vocab("tiny", "padded", multiple=8)
        prep.save_init("padded", "init", mesh="1,2,4")
        recipe = Path("recipe.toml").read_text()
        recipe = recipe.replace("tiny-init", "init").replace("steps = 12", "steps = 3")
        Path("recipe.toml").write_text(recipe)
        lora = recipe.replace("steps = 3", "steps = 2").replace("every = 3", "every = 2")
        lora = lora.replace("warmup_steps = 2", "warmup_steps = 0")
        Path("lora.toml").write_text(lora + "[lora]\nrank = 2\n")
        run_ok("train", "recipe.toml")
        run_ok("train", "lora.toml")
        prep.export("runs/recipe", "hf")
        prep.export("runs/lora", "adapter")
        prep.merge("adapter", "init", "merged")
        yield folder


@pytest.fixture
def chain(template: Path, tmp_path: Path) -> Path:
    """Copy the chain to the working folder of a test."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


def largest_file(folder: str) -> Path:
    """Return the data file of a checkpoint with the most bytes."""
    files = [*Path(folder).rglob("*.safetensors"), *Path(folder).rglob("d/*")]
    return max(files, key=lambda path: path.stat().st_size)


def write_tensor(folder: str, name: str, values: np.ndarray) -> None:
    """Write the values of a tensor in place, where the header of its safetensors file places it."""
    for path in Path(folder).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        header_nbytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_nbytes])
        if name in header:
            first, end = (8 + header_nbytes + offset for offset in header[name]["data_offsets"])
            data[first:end] = values.tobytes()
            path.write_bytes(data)


def ends(link: prep.ChainLink) -> tuple[str, str]:
    return link.output, link.source


def test_chain_lists_the_links_back_to_the_first_model(chain: Path):
    proof = prep.verify_chain("hf")
    assert proof
    assert proof.broken_link is None
    assert proof.origins == ("tiny",)
    assert [(link.command, *ends(link)) for link in proof.links] == [
        ("export", "hf", STEP),
        ("train", STEP, "init"),
        ("save-init", "init", "padded"),
        ("pad-vocab", "padded", "tiny"),
    ]
    assert [link.status for link in proof.links] == ["proven", "holds", "proven", "proven"]
    step = proof.links[1]
    assert (step.changed, step.not_shown, step.check) == ("trained: the parameters", "trained", "")


def test_merge_has_the_links_of_base_and_adapter(chain: Path):
    proof = prep.verify_chain("merged")
    assert proof
    assert [ends(link) for link in proof.links] == [
        ("merged", "init"),
        ("merged", "adapter"),
        ("init", "padded"),
        ("adapter", "runs/lora/2"),
        ("padded", "tiny"),
        ("runs/lora/2", "init"),
    ]


@pytest.mark.parametrize("folder", slow_except(FOLDERS, ["init", STEP, "adapter"]))
def test_flipped_bit_breaks_the_link_of_its_checkpoint(chain: Path, folder: str):
    flip_used_bit(largest_file(folder))
    output = "merged" if folder in FOLDERS[5:] else "hf"
    broken = prep.verify_chain(output).broken_link
    assert broken is not None
    assert broken.status == "failed"
    # The first model has no digests of its own: the output that was made from it has them.
    assert ends(broken) == (("padded", "tiny") if folder == "tiny" else (folder, ""))


@pytest.mark.parametrize("folder", slow_except(FOLDERS[1:], ["init", STEP]))
def test_flipped_digest_breaks_the_link_of_its_checkpoint(chain: Path, folder: str):
    with changed_manifest(Path(folder)) as manifest:
        record = next(iter(manifest["tensors"].values()))
        record["digests"][0][2] = record["digests"][0][2][::-1]
    broken = prep.verify_chain(folder).broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == ((folder, ""), "failed")


def test_swapped_file_breaks_the_link_of_its_checkpoint(chain: Path):
    """The file of another model has the same names and shapes."""
    shutil.copytree("tiny", "other")
    write_tensor("other", "model.norm.weight", np.full(32, 0.5, np.float32))
    prep.pad_vocab("other", "other-padded", multiple=8)
    for path in Path("other-padded").glob("*.safetensors"):
        shutil.copy(path, "padded")
    broken = prep.verify_chain("init").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == (("padded", ""), "failed")
    shutil.rmtree("padded")
    shutil.copytree("other-padded", "padded")
    broken = prep.verify_chain("init").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == (("init", "padded"), "failed")


@pytest.mark.parametrize(
    "name",
    slow_except(["tokenizer.json", "config.json", "generation_config.json"], ["tokenizer.json"]),
)
def test_changed_settings_of_the_first_model_break_its_link(chain: Path, name: str):
    path = chain / "tiny" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert ends(broken) == ("padded", "tiny")
    assert name in broken.reason


@pytest.mark.parametrize("folder", slow_except(["padded", "init", STEP], ["init"]))
def test_changed_tokenizer_of_an_output_breaks_its_link(chain: Path, folder: str):
    path = next(Path(folder).rglob("tokenizer.json"))
    path.write_text(path.read_text().replace("w7", "w8"))
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert broken.source == folder
    assert "tokenizer.json is damaged" in broken.reason


def test_swapped_start_model_breaks_the_link_of_the_step(chain: Path):
    shutil.copytree("tiny", "other")
    write_tensor("other", "model.norm.weight", np.full(32, 0.5, np.float32))
    shutil.rmtree("init")
    prep.save_init("other", "init", pad_vocab=8, mesh="1,2,4")
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == ((STEP, "init"), "failed")
    assert broken.reason.startswith("the manifest of init is ")


@pytest.mark.slow
def test_step_of_another_run_breaks_the_link_of_the_export(chain: Path):
    recipe = Path("recipe.toml").read_text().replace("seed = 3", "seed = 4")
    Path("other.toml").write_text(recipe)
    run_ok("train", "other.toml")
    shutil.rmtree(STEP)
    shutil.copytree("runs/other/3", STEP)
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == (("hf", STEP), "failed")


@pytest.mark.parametrize(
    ("folder", "output"),
    slow_except([("padded", "init"), ("init", STEP), (STEP, "hf")], [("init", STEP)]),
)
def test_edited_manifest_breaks_the_link_of_the_next_output(chain: Path, folder: str, output: str):
    with changed_manifest(Path(folder)) as manifest:
        manifest["request"] += " --overwrite"
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == ((output, folder), "failed")


def test_sums_of_a_merge_are_not_shown(chain: Path):
    base, adapter, *_ = prep.verify_chain("merged").links
    assert (base.status, adapter.status) == ("holds", "holds")
    assert base.proof == "manifest, 24 tensors, config, 3 files"
    assert base.changed.startswith("merged: layers.0.self_attn.q_proj.weight, ")
    assert adapter.proof == "manifest"
    # The check that the link names: the same merge, compared bit by bit.
    assert base.check == "prep merge adapter init --out AGAIN && prep verify merged AGAIN --strict"
    prep.merge("adapter", "init", "AGAIN")
    assert prep.verify("merged", "AGAIN")


def test_adapter_without_manifest_is_not_proven(chain: Path):
    make_adapter(Path("peft"), {"model.layers.1.self_attn.v_proj": (16, 32)})
    prep.merge("peft", "padded", "merged-peft")
    base, adapter, _ = prep.verify_chain("merged-peft").links
    assert base.status == "holds"
    assert ends(adapter) == ("merged-peft", "peft")
    assert adapter.status == "not proven"
    assert adapter.reason == "no recorded digest shows that it is the source"


def test_missing_source_is_not_proven_unless_allowed(chain: Path):
    Path("padded").rename("moved")
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == (("init", "padded"), "not proven")
    assert main(["verify", "hf", "--chain"]) == FAILED
    assert main(["verify", "hf", "--chain", "--allow-unproven"]) == OK
    allowed = prep.verify_chain("hf", allow_unproven=True)
    assert allowed
    assert allowed.links[-1].status == "not proven"


def test_search_finds_a_moved_and_renamed_source(chain: Path, tmp_path: Path):
    archive = tmp_path / "archive" / "models"
    archive.mkdir(parents=True)
    Path("padded").rename(archive / "renamed")
    proof = prep.verify_chain("hf", search=["archive"])
    assert proof
    assert proof.links[2].source == "archive/models/renamed"


def test_source_is_found_above_the_output(chain: Path, monkeypatch: MonkeyPatch):
    monkeypatch.chdir("runs")
    assert prep.verify_chain(chain / STEP)


def test_later_step_of_the_run_does_not_replace_the_exported_one(chain: Path):
    recipe = Path("recipe.toml").read_text()
    Path("recipe.toml").write_text(recipe.replace("steps = 3", "steps = 6"))
    run_ok("train", "recipe.toml", "--set", "optimizer.decay_steps=3")
    proof = prep.verify_chain("hf")
    assert proof
    assert proof.links[0].source == STEP
    assert ends(prep.verify_chain("runs/recipe/6").links[0]) == ("runs/recipe/6", "init")


def test_outputs_of_earlier_versions_are_proven_by_their_values(chain: Path):
    for folder in ("padded", "init"):
        with changed_manifest(Path(folder)) as manifest:
            manifest.pop("origin", None)
    proof = prep.verify_chain("init")
    assert proof
    assert "manifest" not in proof.links[0].proof
    with changed_manifest(Path(STEP)) as manifest:
        del manifest["origin"]
    broken = prep.verify_chain(STEP).broken_link
    assert broken is not None
    assert (broken.status, broken.reason) == ("not proven", "its manifest records no source")


def test_start_without_manifest_is_proven_by_its_first_rows_only(chain: Path):
    recipe = Path("recipe.toml").read_text().replace('path = "init"', 'path = "padded-copy"')
    shutil.copytree("padded", "padded-copy", ignore=shutil.ignore_patterns("prep-manifest.json"))
    Path("direct.toml").write_text(recipe)
    run_ok("train", "direct.toml")
    (link,) = prep.verify_chain("runs/direct/3").links
    assert link.status == "not proven"
    assert "first rows of each tensor" in link.proof
    write_tensor("padded-copy", "model.norm.weight", np.full(32, 0.5, np.float32))
    assert prep.verify_chain("runs/direct/3").links[0].status == "failed"


@pytest.mark.slow
def test_random_start_begins_the_chain(chain: Path):
    recipe = Path("recipe.toml").read_text()
    lines = 'init = "random"\nconfig = "padded"\n'
    Path("random.toml").write_text(recipe.replace('path = "init"\n', lines))
    run_ok("train", "random.toml")
    proof = prep.verify_chain("runs/random/3")
    assert proof
    assert (proof.links, proof.origins) == ((), ("runs/random/3",))


def test_lock_applies_to_the_first_model(chain: Path):
    prep.lock("tiny")
    assert prep.verify_chain("hf", lock="tiny.lock.json")
    prep.lock("padded")
    broken = prep.verify_chain("hf", lock="padded.lock.json").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == (("tiny", ""), "failed")
    assert "differs from padded.lock.json" in broken.reason


def test_padding_that_is_not_zero_breaks_the_link(chain: Path):
    name = "lm_head.weight"
    values = read_tensors(Path("padded"))[name].copy()
    values[131:] = 1
    write_tensor("padded", name, values)
    with changed_manifest(Path("padded")) as manifest:
        digest = xxhash.xxh3_128_hexdigest(values[131:].tobytes())
        manifest["tensors"][name]["digests"][1] = [131, 136, digest]
    broken = prep.verify_chain("padded").broken_link
    assert broken is not None
    assert broken.reason == "rows 131:136 are not the recorded padding: lm_head.weight"


CONVERSIONS = {
    "easylm": ["export", "init", "--layout", "easylm"],
    "hf-flax": ["export", "init", "--layout", "hf-flax"],
    "verbatim": ["save-init", "tiny", "--verbatim"],
    "layers": ["save-init", "tiny", "--layers", "2"],
    "unscanned": ["reshard", "init", "--no-scan"],
}


@pytest.mark.parametrize("name", slow_except(CONVERSIONS, ["hf-flax", "verbatim", "layers"]))
def test_conversion_is_proven_by_its_digests(chain: Path, name: str):
    run_ok(*CONVERSIONS[name], "--out", name)
    proof = prep.verify_chain(name)
    assert proof, proof.broken_link
    assert proof.links[0].status == "proven"
    assert f"{21 if name == 'layers' else 30} tensors" in proof.links[0].proof


CHANGES = {
    "cast": (
        ["export", "init", "--dtype", "bfloat16"],
        "cast from float32 to bfloat16",
        "prep verify cast init --tolerance NUMBER",
    ),
    "filled": (
        ["pad-vocab", "tiny", "--size", "140", "--init", "mean"],
        "new rows",
        "prep pad-vocab tiny --size 140 --init mean --out AGAIN && prep verify filled AGAIN --strict",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_values_are_listed_and_not_shown(chain: Path, name: str):
    words, change, check = CHANGES[name]
    run_ok(*words, "--out", name)
    link = prep.verify_chain(name).links[0]
    assert (link.status, link.not_shown, link.check) == ("holds", change, check)
    assert link.changed.startswith(f"{change}: embed_tokens.weight, ")
    for command in check.replace("NUMBER", "0.01").split(" && "):
        run_ok(*command.removeprefix("prep ").split())


def test_changed_config_of_a_verbatim_conversion_breaks_the_link(chain: Path):
    prep.save_init("tiny", "verbatim", verbatim=True)
    path = Path("tiny/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))
    broken = prep.verify_chain("verbatim").broken_link
    assert broken is not None
    assert "`rms_norm_eps`" in broken.reason


@pytest.mark.slow
@pytest.mark.parametrize("choice", slow_except(["keep", "dequantize"], ["keep"]))
def test_decoded_values_are_not_shown(chain: Path, choice: Literal["keep", "dequantize"]):
    make_quantized(Path("q"), "fp8")
    prep.save_init("q", "q-init", quantized=choice)
    prep.export("q-init", "q-hf")
    export, init = prep.verify_chain("q-hf").links
    if choice == "keep":
        assert (export.status, init.status) == ("proven", "proven")
        return
    assert (export.status, export.not_shown) == ("holds", "decoded or encoded")
    # Only the scales and the weights without codes have equal digests, and the model has no recorded commit.
    assert (init.status, init.not_shown) == ("not proven", "decoded or encoded")
    assert init.proof.startswith("30 tensors, ")
    run_ok(*init.check.removeprefix("prep ").split())
    flip_used_bit(largest_file("q"))
    assert not prep.verify_chain("q-hf")


def test_cast_of_a_model_without_digests_is_not_proven(chain: Path):
    prep.export("tiny", "cast", dtype="bfloat16")
    (link,) = prep.verify_chain("cast").links
    assert link.status == "not proven"
    assert link.reason == "no recorded digest shows that it is the source"
    assert link.proof == "config, 3 files"


def test_command_prints_the_table_and_json(chain: Path, capsys: Capture):
    report = run_json(capsys, "verify", "hf", "--chain")
    # Training is not repeated.
    assert report["proven"] is False
    assert run_json(capsys, "verify", "init", "--chain")["proven"] is True
    assert report["origins"] == ["tiny"]
    assert [link["source"] for link in report["links"]] == [STEP, "init", "padded", "tiny"]
    flip_used_bit(largest_file("init"))
    message = run_failing(capsys, FAILED, "verify", "hf", "--chain")
    assert "error: the link init failed" in message
    assert "differ from their recorded digest" in message


@pytest.mark.parametrize(
    "words",
    [
        ["hf", "init", "--chain"],
        ["hf", "--chain", "--quick"],
        ["hf", "--chain", "--accept", "config.json"],
        ["hf", "--search", "runs"],
        ["hf", "--allow-unproven"],
        ["tiny", "--chain"],
    ],
)
def test_options_that_a_chain_excludes_are_refused(chain: Path, capsys: Capture, words: list[str]):
    assert "Traceback" not in run_failing(capsys, USAGE, "verify", *words)


def test_checkpoint_without_manifest_has_no_chain(chain: Path):
    with pytest.raises(UsageError, match="tiny has no chain"):
        prep.verify_chain("tiny")
    assert prep.verify_chain("padded")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stream", slow_except([[], ["--stream"]], [[]]), ids=["download", "stream"]
)
def test_model_of_the_hub_is_read_at_its_recorded_commit(chain: Path, stream: list[str]):
    files = {path.name: path.read_bytes() for path in Path("tiny").iterdir()}
    weights = [name for name in files if name.endswith(".safetensors")]
    blobs = {hashlib.sha256(files[name]).hexdigest(): files[name] for name in weights}
    with serve_ranges(blobs) as store:
        repos = {"o/m": FakeRepo(files, large=tuple(weights), store=store)}
        with serve_hub(repos) as hub:
            environment = {**os.environ, **hub.environment(chain / "home")}
            for words in (["save-init", "o/m", "--out", "hub"], ["verify", "hub", "--chain"]):
                process = run_python(PREP, *words, "--json", *stream, cwd=chain, env=environment)
                assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["origins"] == [f"o/m at commit {COMMIT}"]
    assert report["links"][0]["proof"].startswith("commit, 30 tensors, config, ")
    origin = json.loads(Path("hub/prep-manifest.json").read_text())["origin"]
    assert origin == {"commit": COMMIT}


def test_chain_in_a_bucket_is_proven(chain: Path, monkeypatch: MonkeyPatch):
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    files = [path for path in Path("padded").rglob("*") if path.is_file()]
    objects = {f"bucket/{path}": path.read_bytes() for path in files}
    with use_objects(monkeypatch, objects) as store:
        run_ok("save-init", "gs://bucket/padded", "--out", "gs://bucket/new")
        proof = prep.verify_chain("gs://bucket/new")
        assert proof
        assert [ends(link) for link in proof.links] == [
            ("gs://bucket/new", "gs://bucket/padded"),
            ("gs://bucket/padded", "tiny"),
        ]
        del store.objects["bucket/padded/model-00001-of-00003.safetensors"]
        broken = prep.verify_chain("gs://bucket/new").broken_link
        assert broken is not None
        assert broken.source == "gs://bucket/padded"


def forge_last_rows(folder: str, name: str, digests: list[list[object]]) -> None:
    """Change the last row of a tensor, and replace its digests in the manifest."""
    values = read_tensors(Path(folder))[name].copy()
    values[-1] += 1
    write_tensor(folder, name, values)
    with changed_manifest(Path(folder)) as manifest:
        manifest["tensors"][name]["digests"] = digests


def test_rows_without_digest_break_the_link(chain: Path):
    """A manifest with fewer digests hides a change of the other rows."""
    forge_last_rows("hf", "model.layers.0.mlp.up_proj.weight", [])
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert (ends(broken), broken.status) == (("hf", ""), "failed")
    assert "has rows without a digest" in broken.reason


def test_digest_of_some_rows_is_damage_of_a_chain(chain: Path):
    name = "model.layers.0.mlp.up_proj.weight"
    first = read_tensors(Path("hf"))[name][:1].tobytes()
    forge_last_rows("hf", name, [[0, 1, xxhash.xxh3_128_hexdigest(first)]])
    with pytest.raises(prep.DamagedError, match="digests of 1 row "):
        prep.verify_chain("hf")


def test_config_file_that_differs_from_the_manifest_breaks_the_link(chain: Path):
    path = Path("hf/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1.0}))
    with changed_manifest(Path("hf")) as manifest:
        data = path.read_bytes()
        record = {"bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
        manifest["files"]["config.json"] = record
    broken = prep.verify_chain("hf").broken_link
    assert broken is not None
    assert "`rms_norm_eps`" in broken.reason


@pytest.mark.parametrize(
    ("folder", "fields", "holds"),
    slow_except(
        [
            ("merged", {"merged": "adapter"}, True),
            ("merged", {"merged": {"adapter": 3}}, True),
            ("init", {"source": "padded"}, False),
            (STEP, {"origin": {"name": 5}}, False),
            # The tensors of the base are not all in the merged model.
            ("merged", {"origin": {"manifest": [1]}}, False),
            # Without the malformed entry, the digests of all tensors and the other entries still prove the link.
            ("init", {"origin": {"name": {}, "commit": 3, "manifest": 1.5}}, True),
            ("init", {"request": "prep save-init 'padded"}, True),
            (STEP, {"recipe": "= ["}, True),
            (STEP, {"recipe": "data = 3"}, True),
        ],
        [
            ("merged", {"merged": "adapter"}, True),
            ("init", {"source": "padded"}, False),
            ("init", {"origin": {"name": {}, "commit": 3, "manifest": 1.5}}, True),
        ],
    ),
)
def test_malformed_manifest_has_no_traceback(
    chain: Path, capsys: Capture, folder: str, fields: dict[str, object], holds: bool
):
    with changed_manifest(Path(folder)) as manifest:
        manifest.update(fields)
    report = run_json(capsys, "verify", folder, "--chain")
    assert report["ok"] is holds


def test_saved_parameters_begin_a_chain(chain: Path):
    params = prep.load_params("init")
    prep.save_params(params, "saved", like="init")
    prep.export("saved", "saved-hf")
    proof = prep.verify_chain("saved-hf")
    assert proof
    assert proof.origins == ("saved",)
