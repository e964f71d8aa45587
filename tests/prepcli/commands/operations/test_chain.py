"""`prep verify --chain` compares the recorded digests of each output with those of its source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.formats.manifest import record_file
from prepcli.restore.digest_checks import towers_digest
from prepcli.sources.locate import locate
from prepcli.sources.open_folder import Access
from prepcli.sources.opening import open_source
from tests.helpers.adapters import make_adapter
from tests.helpers.damage import flip_used_bit, tensor_place
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors
from tests.helpers.towers import write_model
from tests.helpers.training_folder import make_training_folder, write_tokenizer

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
def unchanged(template: Path, monkeypatch: MonkeyPatch) -> None:
    """Work in the folder of the chain. The test must not change it."""
    monkeypatch.chdir(template)


@pytest.fixture
def chain(template: Path, tmp_path: Path) -> Path:
    """Copy the chain to the working folder of a test."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


def write_tensor(folder: str, name: str, values: np.ndarray) -> None:
    """Write the values of a tensor in place."""
    path, low, high = tensor_place(Path(folder), name)
    data = bytearray(path.read_bytes())
    data[low:high] = values.tobytes()
    path.write_bytes(data)


def broken_link(output: str, **options: Any) -> prep.ChainLink:
    """Return the first broken link of a chain."""
    link = prep.verify_chain(output, **options).broken_link
    assert link is not None
    return link


def ends(link: prep.ChainLink) -> tuple[str, str]:
    return link.output, link.source


@pytest.mark.usefixtures("unchanged")
def test_chain_lists_the_links_back_to_the_first_model():
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


@pytest.mark.usefixtures("unchanged")
def test_merge_has_the_links_of_base_and_adapter():
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


def flip_bit_of(folder: str) -> None:
    files = [*Path(folder).rglob("*.safetensors"), *Path(folder).rglob("d/*")]
    flip_used_bit(max(files, key=lambda path: path.stat().st_size))


def reverse_digest(folder: str) -> None:
    with changed_manifest(Path(folder)) as manifest:
        record = next(iter(manifest["tensors"].values()))
        record["digests"][0][2] = record["digests"][0][2][::-1]


def edit_request(folder: str) -> None:
    with changed_manifest(Path(folder)) as manifest:
        manifest["request"] += " --overwrite"


def edit_config(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))


def change_tokenizer(folder: str) -> None:
    path = next(Path(folder).rglob("tokenizer.json"))
    path.write_text(path.read_text().replace("w7", "w8"))


SETTINGS = ["tokenizer.json", "config.json", "generation_config.json"]
DAMAGED = "tokenizer.json is damaged"
# Change and its folder or file; the checked output, output and source of its broken link, and a part of the reason.
BREAKS: list[tuple[Callable[[str], None], str, str, tuple[str, str], str]] = [
    *((flip_bit_of, folder, "hf", (folder, ""), "") for folder in FOLDERS[1:5]),
    *((flip_bit_of, folder, "merged", (folder, ""), "") for folder in FOLDERS[5:]),
    # The first model has no digests of its own: the output that was made from it has them.
    (flip_bit_of, "tiny", "hf", ("padded", "tiny"), ""),
    *((reverse_digest, folder, folder, (folder, ""), "") for folder in FOLDERS[1:]),
    (edit_request, "padded", "hf", ("init", "padded"), ""),
    (edit_request, "init", "hf", (STEP, "init"), ""),
    (edit_request, STEP, "hf", ("hf", STEP), ""),
    *((edit_config, f"tiny/{name}", "hf", ("padded", "tiny"), name) for name in SETTINGS),
    (change_tokenizer, "padded", "hf", ("init", "padded"), DAMAGED),
    (change_tokenizer, "init", "hf", (STEP, "init"), DAMAGED),
    (change_tokenizer, STEP, "hf", ("hf", STEP), DAMAGED),
]
FAST_BREAKS = [
    *((change, "init") for change in (flip_bit_of, edit_request, change_tokenizer)),
    *((flip_bit_of, "adapter"), (reverse_digest, STEP), (edit_config, "tiny/tokenizer.json")),
]


@pytest.mark.parametrize(
    ("change", "changed", "output", "link", "reason"),
    slow_except(BREAKS, lambda case: case[:2] in FAST_BREAKS),
)
def test_change_breaks_the_link_of_its_checkpoint(
    chain: Path,
    change: Callable[[str], None],
    changed: str,
    output: str,
    link: tuple[str, str],
    reason: str,
):
    change(changed)
    broken = broken_link(output)
    assert (ends(broken), broken.status) == (link, "failed")
    assert reason in broken.reason


def test_swapped_file_breaks_the_link_of_its_checkpoint(chain: Path):
    """The file of another model has the same names and shapes."""
    shutil.copytree("tiny", "other")
    write_tensor("other", "model.norm.weight", np.full(32, 0.5, np.float32))
    prep.pad_vocab("other", "other-padded", multiple=8)
    for path in Path("other-padded").glob("*.safetensors"):
        shutil.copy(path, "padded")
    broken = broken_link("init")
    assert (ends(broken), broken.status) == (("padded", ""), "failed")
    shutil.rmtree("padded")
    shutil.copytree("other-padded", "padded")
    broken = broken_link("init")
    assert (ends(broken), broken.status) == (("init", "padded"), "failed")


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
    broken = broken_link("hf")
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
    broken = broken_link(STEP)
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


def test_lock_applies_to_the_first_model(chain: Path):
    prep.lock("tiny")
    assert prep.verify_chain("hf", lock="tiny.lock.json")
    prep.lock("padded")
    broken = broken_link("hf", lock="padded.lock.json")
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
    broken = broken_link("padded")
    assert broken.reason == "rows 131:136 are not the recorded padding: lm_head.weight"


CONVERSIONS = {
    "easylm": ["export", "init", "--layout", "easylm"],
    "hf-flax": ["export", "init", "--layout", "hf-flax"],
    "verbatim": ["save-init", "tiny", "--verbatim"],
    "layers": ["save-init", "tiny", "--layers", "2"],
    "unscanned": ["reshard", "init", "--no-scan"],
}


@pytest.mark.parametrize("name", slow_except(CONVERSIONS, ["hf-flax", "layers"]))
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
    assert first_link("verbatim").status == "proven"
    edit_config("tiny/config.json")
    broken = broken_link("verbatim")
    assert "`rms_norm_eps`" in broken.reason


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
    assert "tiny has no chain" in run_failing(capsys, USAGE, "verify", "tiny", "--chain")
    assert report["origins"] == ["tiny"]
    assert [link["source"] for link in report["links"]] == [STEP, "init", "padded", "tiny"]
    flip_bit_of("init")
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
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_options_that_a_chain_excludes_are_refused(capsys: Capture, words: list[str]):
    assert "Traceback" not in run_failing(capsys, USAGE, "verify", *words)


def test_rows_without_digest_break_the_link(chain: Path):
    """A manifest with fewer digests hides a change of the other rows."""
    name = "model.layers.0.mlp.up_proj.weight"
    values = read_tensors(Path("hf"))[name].copy()
    values[-1] += 1
    write_tensor("hf", name, values)
    with changed_manifest(Path("hf")) as manifest:
        manifest["tensors"][name]["digests"] = []
    broken = broken_link("hf")
    assert (ends(broken), broken.status) == (("hf", ""), "failed")
    assert "has rows without a digest" in broken.reason
    with changed_manifest(Path("hf")) as manifest:
        digest = xxhash.xxh3_128_hexdigest(values[:1].tobytes())
        manifest["tensors"][name]["digests"] = [[0, 1, digest]]
    with pytest.raises(prep.DamagedError, match="digests of 1 row "):
        prep.verify_chain("hf")


def test_config_that_differs_from_the_manifest_breaks_the_link(chain: Path):
    edit_config("hf/config.json")
    with changed_manifest(Path("hf")) as manifest:
        manifest["files"]["config.json"] = record_file(Path("hf/config.json"))
    broken = broken_link("hf")
    assert "`rms_norm_eps`" in broken.reason


MALFORMED: list[tuple[str, dict[str, object], bool]] = [
    ("merged", {"merged": "adapter"}, True),
    ("init", {"source": "padded"}, False),
    # Without the malformed entry, the digests of all tensors and the other entries still prove the link.
    ("init", {"origin": {"name": {}, "commit": 3, "manifest": 1.5}}, True),
    ("merged", {"merged": {"adapter": 3}}, True),
    (STEP, {"origin": {"name": 5}}, False),
    # The tensors of the base are not all in the merged model.
    ("merged", {"origin": {"manifest": [1]}}, False),
    ("init", {"request": "prep save-init 'padded"}, True),
    (STEP, {"recipe": "= ["}, True),
    (STEP, {"recipe": "data = 3"}, True),
]


@pytest.mark.parametrize(("folder", "fields", "holds"), slow_except(MALFORMED, MALFORMED[:3]))
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


@pytest.fixture
def model() -> Path:
    """Write a model `m` with a tokenizer to the working folder."""
    make_checkpoint(Path("m"), LLAMA)
    write_tokenizer(Path("m"))
    return Path("m")


def first_link(output: str) -> prep.ChainLink:
    return prep.verify_chain(output).links[0]


def forget_dropped(output: str) -> prep.ChainLink:
    """Remove the records of dropped tensors from a manifest, and return the first link of its chain, which failed."""
    with changed_manifest(Path(output)) as manifest:
        manifest["dropped"] = []
    link = first_link(output)
    assert link.status == "failed"
    return link


@pytest.mark.parametrize("source", ["out", "other"], ids=["itself", "each-other"])
def test_output_that_is_its_own_source_fails(model: Path, source: str):
    prep.lock(model)
    prep.pad_vocab(model, "out", multiple=8)
    shutil.copytree("out", "other")
    for folder, recorded in (("out", source), ("other", "out")):
        with changed_manifest(Path(folder)) as manifest:
            manifest["source"]["name"] = recorded
            manifest.pop("origin", None)
    broken = broken_link("out", lock="m.lock.json")
    assert broken.status == "failed"
    assert "records itself as source" in broken.reason


def test_lock_without_a_compared_checkpoint_fails(model: Path):
    prep.lock(model)
    prep.pad_vocab(model, "out", multiple=8)
    model.rename("moved")
    broken = broken_link("out", lock="m.lock.json", allow_unproven=True)
    assert broken.status == "failed"
    assert broken.reason == "the lock was compared with no checkpoint"


def test_first_layers_are_compared_with_the_first_layers(model: Path):
    prep.save_init(model, "one", layers=1)
    link = first_link("one")
    assert (link.status, link.reason) == ("proven", "")
    assert link.changed.startswith("left out: layers.1.input_layernorm.weight, ")
    assert "`num_hidden_layers`" in link.changed
    with changed_manifest(Path("one")) as manifest:
        manifest["dropped"].pop()
    assert "missing tensors of m" in first_link("one").reason


def test_keys_of_a_replaced_config_are_listed(model: Path):
    shutil.copy("m/config.json", "other.json")
    edit_config("other.json")
    prep.save_init(model, "out", config="other.json")
    link = first_link("out")
    assert link.status == "proven"
    assert link.changed == "config.json differs from the one of m: `rms_norm_eps`"


def test_added_file_is_not_shown(model: Path):
    prep.pad_vocab(model, "out", multiple=8)
    path = Path("out/chat_template.jinja")
    path.write_text("{{ messages }}")
    with changed_manifest(Path("out")) as manifest:
        manifest["files"][path.name] = record_file(path)
    link = first_link("out")
    assert link.status == "holds"
    assert link.changed == "other files: chat_template.jinja"


def test_copied_file_is_compared(model: Path):
    Path("m/modeling.py").write_text("x = 1")
    prep.save_init(model, "out", copy=["*.py"])
    assert first_link("out").status == "proven"
    Path("m/modeling.py").write_text("x = 2")
    assert first_link("out").reason == "other content than in m: modeling.py"


def test_excluded_file_explains_no_other_one(model: Path):
    Path("m/README.md").write_text("card")
    prep.save_init(model, "init")
    prep.export("init", "out", exclude="README.md")
    assert first_link("out").changed == "left out: README.md"
    Path("out/tokenizer.json").unlink()
    with changed_manifest(Path("out")) as manifest:
        del manifest["files"]["tokenizer.json"]
    assert first_link("out").reason == "missing files of init: tokenizer.json"


def test_lost_tensor_is_a_difference_unless_recorded(model: Path):
    make_checkpoint(Path("old"), GPT_NEO, legacy=True)
    prep.save_init("old", "out")
    link = first_link("out")
    assert link.status == "proven"
    assert link.changed.startswith("left out: ")
    assert forget_dropped("out").reason.startswith("missing tensors of old: ")


def test_lost_rows_are_a_difference_unless_recorded(model: Path):
    prep.pad_vocab(model, "padded", multiple=8)
    prep.export("padded", "out")
    assert prep.verify_chain("out")
    expected = "another dtype or shape than in padded: embed_tokens.weight, lm_head.weight"
    assert forget_dropped("out").reason == expected


def test_changed_key_of_the_config_is_a_difference(model: Path):
    """No option of this command writes these keys."""
    prep.save_init(model, "out")
    with changed_manifest(Path("out")) as manifest:
        manifest["config"]["rms_norm_eps"] = 13
    link = first_link("out")
    assert link.status == "failed"
    assert "`rms_norm_eps`" in link.reason


@pytest.mark.slow
def test_towers_of_the_start_model_are_not_shown(model: Path):
    """A training step has no towers. Its export reads them from the start model."""
    write_model("llava", Path("start"))
    prep.save_init("start", "init")
    towers = json.loads(Path("init/prep-manifest.json").read_text())["towers"]
    prep.export("start", "text", text_only=True)
    prep.save_init("text", "step")
    with changed_manifest(Path("step")) as manifest:
        records = manifest["tensors"]
        manifest["tensors"] = {f"language_model.{name}": records[name] for name in records}
        start = open_source(locate("start", access=Access()))
        manifest["towers"] = {**towers, "path": "start", "digest": towers_digest(start)}
    prep.export("step", "hf")
    link = prep.verify_chain("hf").links[0]
    assert (link.status, link.not_shown) == ("holds", "read from the start model")
    assert link.check == "prep verify hf start"
    assert prep.verify("hf", "start")
    path = Path("start/model.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if "vision" in name)
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)
    assert not prep.verify("hf", "start")


def test_text_part_is_compared_with_the_text_part(model: Path):
    write_model("llava", Path("start"))
    prep.export("start", "text", text_only=True)
    link = first_link("text")
    assert (link.status, link.reason) == ("proven", "")
    assert link.proof == "39 tensors, config"
    assert link.changed == "left out: towers, preprocessor_config.json"
    assert forget_dropped("text").reason


def test_options_are_found_behind_a_name_with_a_quote(model: Path):
    shutil.copytree(model, "o'brien --init x")
    prep.pad_vocab("o'brien --init x", "zeros", multiple=8)
    prep.pad_vocab("o'brien --init x", "mean", multiple=8, init="mean")
    assert first_link("zeros").status == "proven"
    assert first_link("mean").status == "holds"
