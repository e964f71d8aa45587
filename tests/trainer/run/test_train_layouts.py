"""`prep train` with layouts of data, the text part of a multimodal model, and a run in a bucket."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from prepcli.formats.manifest import MANIFEST_FILE, RECIPE_FILE, listed_steps
from tests.helpers.chat_masks import (
    LOSS_PARTS,
    marked_spans,
    mask_of_spans,
    write_tokenizer_of_bytes,
)
from tests.helpers.fork_server import PREP, ForkedProcess, run_python
from tests.helpers.hub_server import COMMIT, FakeRepo, serve_hub
from tests.helpers.manifests import changed_manifest
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import safetensors_bytes
from tests.helpers.tiny_checkpoints import GPT2, make_checkpoint
from tests.helpers.towers import PROCESSOR, write_model
from tests.helpers.train_runs import read_losses, set_keys
from tests.helpers.training_folder import RECIPE as TINY_RECIPE
from tests.helpers.training_folder import make_training_folder, write_tokenizer
from tests.helpers.waiting import wait_until
from tests.trainer.run.test_logs import FakeWandb
from tests.trainer.training.test_setup import LAYOUTS, TEMPLATE
from trainer.run.logs import ID_FILE
from trainer.run.run_record import ENVIRONMENT_FILE
from trainer.run.storage import TOKENS_FOLDER
from trainer.training.metrics import METRICS_FILE, read_metrics

END = "<|im_end|>"
N_RECORDS = 200
LENGTH = 64
BATCH = 8
STEPS = 5
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
B1, B2, EPS = 0.9, 0.99, 1e-6
LOSS_ATOL = 2e-6
RECIPE = f"""\
mesh = "1,2,4"
[model]
path = "tiny"
[data]
path = "rows.jsonl"
seq_length = {LENGTH}
holdout = 0
shuffle = false
[batch]
size = {BATCH}
[optimizer]
lr = {LEARNING_RATE}
schedule = "constant"
b1 = {B1}
b2 = {B2}
eps = {EPS}
weight_decay = {WEIGHT_DECAY}
clip_norm = 0
[train]
steps = {STEPS}
log_every = 1
[checkpoint]
every = 0
"""
# The question, the answer and the text of the layouts.
NUMBERS = re.compile(r"1\+1|\b2\b|\bOne\b")


def numbered(text: str, number: int) -> str:
    """Return a text of a layout with the numbers of a record."""
    first, second = 7 * number % 100, 3 * number % 50
    texts = {"1+1": f"{first}+{second}", "2": f"{first + second}", "One": f"{first} {second}"}
    return NUMBERS.sub(lambda match: texts[match[0]], text)


def numbered_value(value: Any, number: int) -> Any:
    """Return a value of a layout with the numbers of a record in its texts."""
    if isinstance(value, str):
        return numbered(value, number)
    if isinstance(value, list):
        return [numbered_value(item, number) for item in value]
    if isinstance(value, dict):
        return {key: numbered_value(item, number) for key, item in value.items()}
    return value


class Document:
    """The tokens of a record, and whether each one has loss."""

    def __init__(self, tokenizer: Tokenizer, marked: str, *, has_end: bool) -> None:
        text = LOSS_PARTS.sub(r"\1", marked)
        if has_end:
            text += END
            marked += f"⟦{END}⟧"
        encoded = tokenizer.encode(text, add_special_tokens=False)
        spans = marked_spans(text, marked)
        assert spans is not None
        self.ids = encoded.ids
        self.mask = mask_of_spans(encoded.offsets, spans)


def write_layout(name: str) -> npt.NDArray[np.int64]:
    """Write a model and records in a layout to the current folder.

    Returns:
        The ids and the masks of all steps, [2, steps, batch, length].
    """
    record, (data_format, _), marked = LAYOUTS[name]
    write_tokenizer_of_bytes(Path("tokenizer.json"))
    tokenizer = Tokenizer.from_file("tokenizer.json")
    model = Path("tiny")
    make_checkpoint(model, GPT2 | {"vocab_size": 288, "eos_token_id": tokenizer.token_to_id(END)})
    Path("tokenizer.json").rename(model / "tokenizer.json")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [numbered_value(record, number) for number in range(N_RECORDS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    has_end = data_format not in ("chat", "sharegpt", "alpaca")
    documents = [
        Document(tokenizer, numbered(marked, number), has_end=has_end)
        for number in range(N_RECORDS)
    ]
    ids = [token for document in documents for token in document.ids]
    mask = [token for document in documents for token in document.mask]
    shape = (2, STEPS, BATCH, LENGTH)
    return np.array([ids, mask])[:, : STEPS * BATCH * LENGTH].reshape(shape)


class AdamW:
    """AdamW of Loshchilov and Hutter (https://arxiv.org/abs/1711.05101), Algorithm 2, in float64."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        import torch

        self._params = params
        self._first = {name: torch.zeros_like(value) for name, value in params.items()}
        self._second = {name: torch.zeros_like(value) for name, value in params.items()}
        self._step = 0

    def update(self, gradients: Mapping[str, Any]) -> None:
        self._step += 1
        for name, param in self._params.items():
            gradient = gradients[name]
            self._first[name].mul_(B1).add_((1 - B1) * gradient)
            self._second[name].mul_(B2).add_((1 - B2) * gradient**2)
            first = self._first[name] / (1 - B1**self._step)
            second = self._second[name] / (1 - B2**self._step)
            # Biases and norms are not decayed.
            decay = WEIGHT_DECAY if param.ndim > 1 else 0.0
            param.sub_(LEARNING_RATE * (first / (second.sqrt() + EPS) + decay * param))


def reference_losses(ids: npt.NDArray[np.int64], masks: npt.NDArray[np.int64]) -> list[float]:
    """Return the losses of the steps of transformers' model in float64."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float64).eval()
    params = dict(model.named_parameters())
    optimizer = AdamW(params)
    losses: list[float] = []
    for step_ids, step_mask in zip(torch.tensor(ids), torch.tensor(masks, dtype=torch.float64)):
        logits = model(step_ids, use_cache=False).logits
        assert logits.dtype == torch.float64
        log_probs = logits[:, :-1].log_softmax(-1)
        nll = -log_probs.gather(-1, step_ids[:, 1:, None])[..., 0]
        loss = (nll * step_mask[:, 1:]).sum() / step_mask[:, 1:].sum()
        gradients = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            optimizer.update(dict(zip(params, gradients)))
        losses.append(loss.item())
    return losses


# All layouts share the compiled steps. The default case has tools, a system text and loss on parts of a document.
@pytest.mark.parametrize("name", slow_except(LAYOUTS, ["glaive-toolcall"]))
def test_losses_of_layouts_equal_float64(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ids, masks = write_layout(name)
    Path("recipe.toml").write_text(RECIPE)
    expected = reference_losses(ids, masks)
    assert main(["train", "recipe.toml"]) == OK
    assert "the columns of the data mean `data.f" in capsys.readouterr().err
    losses = read_losses("runs/recipe")
    errors = np.abs(np.array(losses) - expected)
    print(f"{name}: {' '.join(f'{loss:.6f}' for loss in expected)}, difference {errors.max():.1e}")
    assert errors.max() <= LOSS_ATOL


# `prep train` of the text part of a multimodal model: steps without towers, and exports with them.

VOCAB = 128
TEXT_PREFIX = "model.language_model."
TEXT_NAMES = (TEXT_PREFIX, "lm_head.")
OFFLINE_EXPORT = """
import prepcli as prep
prep.export("runs/recipe", "hf", towers="o/m", offline=True)
"""


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a multimodal model, its init, and a run of three steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        write_model("qwen3_vl")
        words = [f"w{number}" for number in range(VOCAB)]
        write_tokenizer(Path("m"), words)
        run_ok("save-init", "./m")
        numbers = np.cumsum(np.random.default_rng(0).integers(0, 3, 1500)) % VOCAB
        Path("text.txt").write_text(" ".join(words[number] for number in numbers))
        recipe = TINY_RECIPE.replace("1,2,4", "8,1,1").replace("tiny-init", "m-init")
        Path("recipe.toml").write_text(recipe.replace("steps = 12", "steps = 3"))
        run_ok("train", "recipe.toml")
    return folder


@pytest.fixture
def trained(trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the folder to the working folder of a test."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_folder, tmp_path, dirs_exist_ok=True)
    return trained_folder


def test_step_records_path_and_digest_of_towers(trained: Path):
    manifest = json.loads(Path("runs/recipe/3/prep-manifest.json").read_text())
    assert manifest["towers"]["path"] == str(trained / "m-init")
    assert len(manifest["towers"]["digest"]) == 32
    assert not any(name.startswith("towers") for name in manifest["leaves"])
    assert all(name.startswith(TEXT_NAMES) for name in manifest["tensors"])


def test_chain_proves_the_text_part_of_a_step(trained: Path):
    run_ok("export", "runs/recipe", "--text-only", "--out", "text")
    link = prep.verify_chain("text").links[0]
    assert (link.status, link.reason) == ("proven", "")


def test_export_of_step_has_towers_of_start_model(trained: Path):
    before = safetensors_bytes(Path("m"))
    run_ok("export", "runs/recipe", "--out", "hf")
    exported = safetensors_bytes(Path("hf"))
    assert exported.keys() == before.keys()
    changed = {name for name in before if exported[name] != before[name]}
    assert changed == {name for name in before if name.startswith(TEXT_NAMES)}
    assert json.loads(Path("hf/config.json").read_text()) == json.loads(
        Path("m/config.json").read_text()
    )
    assert Path("hf", PROCESSOR).read_bytes() == Path("m", PROCESSOR).read_bytes()
    run_ok("verify", "hf")
    verification = prep.verify("hf", "runs/recipe")
    assert verification.is_equal
    assert verification.tensors == len(changed)
    proof = prep.verify_chain("hf")
    assert proof
    assert proof.links[0].status == "holds"
    assert proof.links[0].not_shown == "read from the start model"
    assert proof.links[0].check == f"prep verify hf {trained / 'm-init'}"
    assert f", {len(changed)} tensors, " in proof.links[0].proof
    run_ok("export", "runs/recipe", "--text-only", "--out", "text")
    text = safetensors_bytes(Path("text"))
    assert text == {
        name.replace(TEXT_PREFIX, "model."): exported[name]
        for name in exported
        if name.startswith(TEXT_NAMES)
    }


def test_verify_of_step_compares_text_part_with_init(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    manifest = json.loads(Path("m-init/prep-manifest.json").read_text())
    assert main(["verify", "runs/recipe", "m-init"]) == 1
    printed = capsys.readouterr()
    assert "towers of m-init" in printed.err
    assert "ignored: only the text part is compared" in printed.err
    text = {name for name in manifest["tensors"] if name.startswith(TEXT_NAMES)}
    differences = prep.verify("runs/recipe", "m-init").differences
    assert {difference["tensor"] for difference in differences} <= text


@pytest.mark.parametrize("towers", slow_except(["m", "other-mesh"], ["other-mesh"]))
def test_export_reads_towers_of_named_copy(towers: str, trained: Path):
    run_ok("reshard", "m-init", "--mesh", "1,2,1", "--no-scan", "--out", "other-mesh")
    run_ok("export", "runs/recipe", "--out", "a")
    run_ok("export", "runs/recipe", "--towers", f"./{towers}", "--out", "b")
    assert safetensors_bytes(Path("a")) == safetensors_bytes(Path("b"))


def test_other_towers_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]):
    write_model("gemma3", Path("other"))
    capsys.readouterr()
    lines = error_lines(capsys, "export", "runs/recipe", "--towers", "./other")
    assert lines[0] == (
        "error: ./other has other towers than the model of runs/recipe at its start"
    )
    assert "--text-only" in lines[-1]
    shutil.rmtree("other")
    lines = error_lines(capsys, "export", "runs/recipe", "--towers", "./other")
    assert lines[0] == "error: the towers of runs/recipe cannot be read"
    assert not Path("recipe-hf").exists()


@pytest.mark.parametrize("start", slow_except(["m-init", "./m", "runs/recipe"], ["m-init"]))
def test_other_rope_type_is_refused_with_mrope(
    start: str, trained: Path, capsys: pytest.CaptureFixture[str]
):
    scaling = 'rope_scaling = {rope_type = "linear", factor = 2.0}'
    recipe = Path("recipe.toml").read_text().replace("m-init", start)
    Path("rope.toml").write_text(recipe.replace("[model]", f"[model]\n{scaling}"))
    capsys.readouterr()
    lines = error_lines(capsys, "train", "rope.toml")
    assert lines[0] == ("error: `model.rope_scaling` of type linear is not supported for qwen3_vl")
    assert not Path("runs/rope").exists()


def test_override_of_rope_type_is_refused_with_mrope(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    scaling = 'overrides = {rope_scaling = {rope_type = "yarn", factor = 4.0}}'
    recipe = Path("recipe.toml").read_text()
    Path("rope.toml").write_text(recipe.replace("[model]", f"[model]\n{scaling}"))
    capsys.readouterr()
    lines = error_lines(capsys, "train", "rope.toml")
    assert lines[0] == "error: `model.overrides` of type yarn is not supported for qwen3_vl"
    assert not Path("runs/rope").exists()


def test_towers_on_the_hub_are_not_requested_offline(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serve_hub({"o/m": FakeRepo({"config.json": b"{}"})}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        process = run_python(OFFLINE_EXPORT, cwd=tmp_path, env=environment)
    assert process.returncode != 0
    assert "the towers of runs/recipe cannot be read" in process.stderr
    assert hub.requests == []


# `prep train --out gs://…`: runs in an object store equal local runs, also after a kill, a stop or a failure.

ROOT = Path(__file__).parents[3]
URL = "gs://bucket/runs/tiny"
BUCKET_PREFIX = "bucket/runs/tiny/"
LOCAL = Path("runs/gs/bucket/runs/tiny")
SETTINGS = (
    "mesh=1,2,2",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "data.holdout=0",
    "train.steps=4",
)
OVERRIDES = set_keys(*SETTINGS)
EIGHT_DEVICES = set_keys("mesh=1,2,4", *SETTINGS[1:])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    """Make a training folder, and serve an empty store that the environment names."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "PREP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    with use_objects(monkeypatch) as fake:
        yield fake


def saved(store: FakeObjectStore) -> list[int]:
    return listed_steps(store.objects_below(BUCKET_PREFIX))


def digests(manifest: bytes) -> dict[str, Any]:
    content = json.loads(manifest)
    return {key: content[key] for key in ("tensors", "slots", "others")}


def bucket_digests(store: FakeObjectStore, step: int) -> dict[str, Any]:
    return digests(store.objects[f"{BUCKET_PREFIX}{step}/{MANIFEST_FILE}"])


def local_digests(run: str, step: int) -> dict[str, Any]:
    return digests(Path(run, str(step), MANIFEST_FILE).read_bytes())


def start(count: int, *words: str, env: dict[str, str] | None = None) -> list[ForkedProcess]:
    """Start a training in `count` processes with four devices together."""
    command = ("train", "recipe.toml", "--out", URL, *OVERRIDES, *words)
    return start_processes(
        *command, count=count, devices=4 // count, env={"PYTHONPATH": str(ROOT), **(env or {})}
    )


def run_processes(count: int, *words: str, code: int = OK) -> None:
    results = finish(start(count, *words))
    assert [result[0] for result in results] == [code] * count, results


def train(*words: str) -> int:
    return main(["train", "recipe.toml", *EIGHT_DEVICES, *words])


def test_stopped_and_resumed_run_equals_a_local_run(
    store: FakeObjectStore, capsys: pytest.CaptureFixture[str]
):
    assert train("--out", "local", "-q") == OK
    assert train("--out", URL, "--stop-after", "2") == STOPPED
    assert "cannot be locked" not in capsys.readouterr().err
    assert saved(store) == [1, 2]
    (LOCAL / METRICS_FILE).unlink()  # as on another host
    assert train("--out", URL, "--json") == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["resumed_at"], report["output"], report["run"]) == (2, f"{URL}/4", URL)
    assert saved(store) == [3, 4]
    assert bucket_digests(store, 4) == local_digests("local", 4)
    names = {path.partition("/")[0] for path in store.objects_below(BUCKET_PREFIX)}
    assert names == {"3", "4", RECIPE_FILE, METRICS_FILE, ENVIRONMENT_FILE}
    Path("uploaded.jsonl").write_bytes(store.objects[f"{BUCKET_PREFIX}{METRICS_FILE}"])
    losses = [
        [line["loss"] for line in read_metrics(path) if "loss" in line]
        for path in (Path("uploaded.jsonl"), Path("local", METRICS_FILE))
    ]
    assert losses[0] == losses[1]
    assert (LOCAL / TOKENS_FOLDER).is_dir()
    assert not Path("gs:").exists()


def test_event_files_need_a_folder(store: FakeObjectStore, capsys: pytest.CaptureFixture[str]):
    assert train("--out", URL, "--set", "log.tensorboard=true", "-q") == USAGE
    assert '`log.tensorboard = "FOLDER"`' in capsys.readouterr().err
    assert store.objects == {}


def test_other_objects_are_not_a_run(store: FakeObjectStore, capsys: pytest.CaptureFixture[str]):
    store.objects[f"{BUCKET_PREFIX}photo.png"] = b"x"
    assert train("--out", URL, "-q") == FAILED
    assert f"{URL} already exists and is not a run" in capsys.readouterr().err
    assert list(store.objects) == [f"{BUCKET_PREFIX}photo.png"]


def test_refused_save_keeps_earlier_steps(
    store: FakeObjectStore, capsys: pytest.CaptureFixture[str]
):
    store.failing_requests = f"PUT {BUCKET_PREFIX}2/"
    assert train("--out", URL, "-q") == FAILED
    error = capsys.readouterr().err
    assert f"cannot write {URL}/2" in error
    assert "GOOGLE_APPLICATION_CREDENTIALS" in error
    assert saved(store) == [1]
    store.failing_requests = "\0"
    assert train("--out", URL, "--json") == OK
    assert json.loads(capsys.readouterr().out)["resumed_at"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["state/d/", "state/manifest.ocdbt", MANIFEST_FILE])
@pytest.mark.parametrize("count", [1, 2])
def test_kill_in_an_upload_keeps_earlier_steps(store: FakeObjectStore, count: int, place: str):
    run_processes(count, "--set", "checkpoint.keep='all'")
    expected = {step: bucket_digests(store, step) for step in (2, 4)}
    store.objects.clear()
    store.requests.clear()
    line = f"PUT {BUCKET_PREFIX}3/{place}"
    store.failing_requests, store.stall = line, "silent"
    running = start(count, "--set", "checkpoint.keep='all'")
    wait_until(lambda: any(line in request for request in store.requests))
    for process in running:
        process.kill()
    finish(running)
    assert saved(store) == [1, 2]
    store.failing_requests = "\0"
    run_processes(count, "--set", "checkpoint.keep='all'")
    assert {step: bucket_digests(store, step) for step in (2, 4)} == expected
    assert not [path for path in store.objects_below(BUCKET_PREFIX) if "/.prep/" in path]


@pytest.mark.slow
def test_processes_save_to_a_bucket_as_to_a_folder(store: FakeObjectStore):
    """Two processes on a mesh of 2 x 2 devices, resumed by four and by one."""
    words = set_keys("checkpoint.every=1", "mesh=1,2,2")
    folder = ["train", "recipe.toml", "--out", "local", *OVERRIDES]
    results = finish(start_processes(*folder, count=2, devices=2, env={"PYTHONPATH": str(ROOT)}))
    assert [code for code, _, _ in results] == [OK] * 2, results
    run_processes(2, *words)
    assert bucket_digests(store, 4) == local_digests("local", 4)
    assert len(store.objects_below(f"{BUCKET_PREFIX}4/state/d/")) == 3, (
        "a file per process, and the index"
    )
    run_processes(2, *words, "--restart", "--stop-after", "1", code=STOPPED)
    run_processes(4, *words, "--stop-after", "1", code=STOPPED)
    run_processes(1, *words)
    assert saved(store) == [3, 4]
    assert main(["verify", URL, "-q"]) == OK


PREFIX = "model.language_model."


@pytest.mark.slow
def test_export_reads_towers_of_start_commit(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    recipe = Path("recipe.toml").read_text().replace("m-init", "o/m@main")
    Path("hub.toml").write_text(recipe)
    files = {path.name: path.read_bytes() for path in Path("m").iterdir()}
    commands = (("train", "hub.toml"), ("export", "runs/hub", "--out", "hf"))
    # After the start of the run, its model is no longer on the main branch.
    repositories = (FakeRepo(files), FakeRepo(files, revisions=(COMMIT,)))
    for words, repository in zip(commands, repositories, strict=True):
        with serve_hub({"o/m": repository}) as hub:
            environment = {**os.environ, **hub.environment(tmp_path / words[0])}
            process = run_python(PREP, *words, cwd=tmp_path, env=environment)
        assert process.returncode == 0, process.stderr
    exported = safetensors_bytes(Path("hf"))
    before = safetensors_bytes(Path("m"))
    visual = [name for name in before if name.startswith("model.visual.")]
    assert all(exported[name] == before[name] for name in visual)


@pytest.mark.slow
def test_changed_rope_theta_keeps_mrope_in_export(trained: Path):
    recipe = Path("recipe.toml").read_text()
    Path("rope.toml").write_text(recipe.replace("[model]", "[model]\nrope_theta = 2e6"))
    run_ok("train", "rope.toml")
    run_ok("export", "runs/rope", "--out", "hf")
    before = json.loads(Path("m/config.json").read_text())
    before["text_config"]["rope_parameters"]["rope_theta"] = 2e6
    assert json.loads(Path("hf/config.json").read_text()) == before


@pytest.mark.slow
def test_wandb_continues_the_id_of_the_bucket(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = ("--out", URL, "--set", 'log.wandb={ project = "p", offline = true }', "-q")
    assert train(*words, "--stop-after", "1") == STOPPED
    assert store.objects[f"{BUCKET_PREFIX}{ID_FILE}"] == b"new1\n"
    (LOCAL / ID_FILE).unlink()  # as on another host
    assert train(*words, "--stop-after", "1") == STOPPED
    assert [arguments["id"] for arguments in wandb.inits] == [None, "new1"]
    assert [step for step, values in wandb.logged if "train/loss" in values] == [1, 2]


@pytest.mark.slow
def test_adapter_merges_into_multimodal_model(trained: Path, capsys: pytest.CaptureFixture[str]):
    before = safetensors_bytes(Path("m"))
    recipe = Path("recipe.toml").read_text()
    Path("lora.toml").write_text(f'{recipe}\n[lora]\nrank = 4\ntargets = ["attn.q"]\n')
    run_ok("train", "lora.toml")
    run_ok("export", "runs/lora", "--out", "adapter")
    for base in ("./m", "m-init"):
        run_ok("merge", "adapter", base, "--out", "merged", "--overwrite")
        merged = safetensors_bytes(Path("merged"))
        assert merged.keys() == before.keys()
        changed = {name for name in before if merged[name] != before[name]}
        assert changed == {name for name in before if "language_model" in name and "q_proj" in name}

    for words in (["--text-only"], ["--towers", "m"], ["--exclude", "README.md"]):
        capsys.readouterr()
        lines = error_lines(capsys, "export", "runs/lora", *words)
        assert lines[0] == f"error: `{' '.join(words)}` has no effect for runs/lora"
        assert "it has only adapters" in lines[1]


@pytest.mark.slow
def test_adapter_merges_into_step_with_towers_of_its_start(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = Path("recipe.toml").read_text().replace("m-init", "runs/recipe")
    Path("lora.toml").write_text(f'{recipe}\n[lora]\nrank = 4\ntargets = ["attn.q"]\n')
    run_ok("train", "lora.toml")
    run_ok("export", "runs/lora", "--out", "adapter")
    run_ok("merge", "adapter", "runs/recipe", "--out", "merged")
    run_ok("export", "runs/recipe", "--out", "base")
    run_ok("merge", "adapter", "./base", "--out", "expected")
    assert safetensors_bytes(Path("merged")) == safetensors_bytes(Path("expected"))
    with changed_manifest(Path("runs/recipe/3")) as manifest:
        manifest["towers"]["path"] = "./absent"
    capsys.readouterr()
    lines = error_lines(capsys, "merge", "adapter", "runs/recipe", "--out", "other")
    assert lines[0] == "error: the towers of runs/recipe cannot be read"
    assert "export runs/recipe --towers CHECKPOINT" in lines[-1]


@pytest.mark.slow
def test_commands_read_a_run_in_a_bucket(
    store: FakeObjectStore, capsys: pytest.CaptureFixture[str]
):
    assert train("--out", "local", "-q") == OK
    assert train("--out", URL, "-q") == OK
    store.objects[f"{BUCKET_PREFIX}9/state/_METADATA"] = b"{}"  # a save that was killed
    assert main(["verify", URL, "-q"]) == OK
    assert main(["verify", f"{URL}/3", "-q"]) == OK
    assert main(["export", URL, "--out", "learned", "-q"]) == OK
    assert main(["verify", "learned", "local", "-q"]) == OK
    assert main(["inspect", URL, "-q"]) == OK
    capsys.readouterr()
    texts = []
    for name in ("local", URL):
        assert main(["generate", name, "--tokens", "1,2,3", "--max-new-tokens", "4", "-q"]) == OK
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["report", URL, "local", "--json", "-q"]) == OK
    report = json.loads(capsys.readouterr().out)
    (remote, local), page = report["runs"], Path("report.html").read_text()
    assert (report["output"], remote.pop("run"), local.pop("run")) == ("report.html", URL, "local")
    assert (remote["step"], remote["steps"], remote["loss"]) == (4, 4, local["loss"])
    assert '>tiny</td><td class="n">3</td>' in page
    assert ">9</td>" not in page
    assert main(["report", f"{URL}-none", "-q"]) == FAILED
    assert f"{URL}-none does not exist" in capsys.readouterr().err
    assert (
        train("--out", "next", "--set", f"model.path={URL}", "--stop-after", "1", "-q") == STOPPED
    )


@pytest.mark.slow
def test_dry_run_keeps_the_bucket_and_restart_deletes_its_steps(
    store: FakeObjectStore, capsys: pytest.CaptureFixture[str]
):
    assert train("--out", URL, "--dry-run", "-q") == OK
    assert store.objects == {}
    assert not (LOCAL / TOKENS_FOLDER).exists()
    assert train("--out", URL, "--stop-after", "2", "-q") == STOPPED
    store.objects[f"{BUCKET_PREFIX}3/state/_METADATA"] = b"{}"
    assert train("--out", URL, "--restart", "--stop-after", "1", "-q") == STOPPED
    assert saved(store) == [1]
    assert not store.objects_below(f"{BUCKET_PREFIX}3/")
    assert train("--out", URL, "--restart", "--set", f"model.path={URL}", "-q") != OK
    assert saved(store) == [1]
    (LOCAL / "exports").mkdir()
    shutil.copytree("tiny", LOCAL / "exports/1")
    export = f"model.path={LOCAL / 'exports/1'}"
    assert train("--out", URL, "--restart", "--set", export, "--stop-after", "1", "-q") == USAGE
    assert saved(store) == [1]
    assert (LOCAL / "exports/1/config.json").is_file()
    capsys.readouterr()
    assert train("--out", URL, "--set", "seed=7", "-q") != OK
    assert "seed" in capsys.readouterr().err


@pytest.mark.slow
def test_finished_run_in_a_bucket_does_nothing_on_another_host(store: FakeObjectStore):
    """Its log, which shows that the last evaluation is complete, is in the bucket only."""
    words = ("--out", URL, "--set", "data.cache=tokens", "-q")
    assert train(*words) == OK
    objects = dict(store.objects)
    shutil.rmtree(LOCAL)
    assert train(*words) == OK
    assert dict(store.objects) == objects
