"""The training loop: resuming is bit-exact, and logging, evaluation and saving happen when they should."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import model_logits
from prepcli.core.errors import PrepError, UsageError
from prepcli.engine.blobs import HostLeaf
from prepcli.planning.manifest_fields import Manifest
from tests.helpers import runs
from tests.helpers.slow_cases import slow_except
from tests.helpers.training_folder import write_tokenizer
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.nn.initialization import init_params
from trainer.nn.model_spec import AttentionOptions
from trainer.recipe import load_recipe
from trainer.training import loop
from trainer.training.checkpoint import PendingSave, restore_state
from trainer.training.events import LoopConfig
from trainer.training.loop import Loop
from trainer.training.metrics import (
    METRICS_FILE,
    MetricsFileLog,
    SamplesFileLog,
    read_metrics,
    sample_line,
)
from trainer.training.samples import Sampler, build_sampler
from trainer.training.step import StepSetup, TrainState

STEPS = 20


class FinishedRun:
    """A finished run of `Loop`, with its checkpoints, recording and metrics.

    It resumes from the last step of `checkpoints` unless `state` is given.
    """

    def __init__(
        self,
        folder: Path,
        job: LoopConfig,
        checkpoints: runs.MemoryCheckpoints | None = None,
        state: TrainState | None = None,
    ) -> None:
        self.checkpoints, self.recording = (
            checkpoints or runs.MemoryCheckpoints(),
            runs.RecordingLog(),
        )
        steps = self.checkpoints.steps()
        if state is None:
            state = (
                restore_state(self.checkpoints.open(steps[-1]), job.setup)
                if steps
                else runs.make_state(job.setup)
            )
        self.metrics_path = folder / METRICS_FILE
        self.loop = Loop(
            job,
            state,
            checkpoints=self.checkpoints,
            logs=[MetricsFileLog(self.metrics_path, int(state["step"])), self.recording],
        )
        self.loop.run()
        self.result = self.loop

    def losses(self) -> list[float]:
        """Return the logged loss of each step."""
        return [line["loss"] for line in read_metrics(self.metrics_path) if "loss" in line]


COMPILED: dict[tuple[int, int], Any] = {}
compile_step = Loop._compile_step


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """Compile each setup and batch size once, so that all runs use the same executable."""

    def cached(self: Loop) -> Any:
        key = id(self.config.setup), self.config.order.batch_size
        if key not in COMPILED:
            # The reference keeps the setup alive, so that its id is not used again.
            COMPILED[key] = (compile_step(self), self.config.setup)
        return COMPILED[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_compile_step", cached)
        yield


@pytest.fixture(scope="module")
def setup() -> runs.StepSetup:
    return runs.make_setup(runs.LLAMA, mesh="1,2,4", accumulate=2, dropout=runs.DROPOUT)


@pytest.fixture(scope="module")
def uninterrupted(setup: runs.StepSetup, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return FinishedRun(tmp_path_factory.mktemp("uninterrupted"), runs.make_job(setup, steps=STEPS))


def test_loop_takes_all_steps(uninterrupted: FinishedRun):
    assert uninterrupted.result.step == STEPS
    assert not uninterrupted.result.stop_reason
    assert uninterrupted.checkpoints.steps() == [STEPS], (
        "with `save_every` 0 only the last step is saved"
    )
    assert [line["step"] for line in uninterrupted.recording.lines] == list(range(1, STEPS + 1))
    assert uninterrupted.losses()[-1] < uninterrupted.losses()[0] - 1
    assert [line["step"] for line in uninterrupted.recording.evaluations] == [STEPS]
    assert uninterrupted.recording.lines[-1]["tokens"] == STEPS * 8 * runs.LENGTH


# An epoch ends in step 6.
@pytest.mark.parametrize("stop", slow_except(range(1, STEPS), (6,)))
def test_loop_resumes_bit_exactly_after_any_step(
    stop: int, setup: runs.StepSetup, uninterrupted: FinishedRun, tmp_path: Path
):
    first = FinishedRun(tmp_path, runs.make_job(setup, steps=STEPS, stop_after=stop))
    assert (first.result.step, first.result.stop_reason) == (stop, f"`--stop-after {stop}`")
    assert first.checkpoints.steps() == [stop]
    second = FinishedRun(tmp_path, runs.make_job(setup, steps=STEPS), first.checkpoints)
    assert second.result.step == STEPS
    assert runs.state_bytes(second.loop.state) == runs.state_bytes(uninterrupted.loop.state)
    assert second.losses() == uninterrupted.losses()


def test_loop_resumes_on_another_mesh_with_same_batches(
    setup: runs.StepSetup, uninterrupted: FinishedRun, tmp_path: Path
):
    first = FinishedRun(tmp_path, runs.make_job(setup, steps=STEPS, stop_after=7))
    other_setup = runs.make_setup(runs.LLAMA, mesh="2,4,1", dropout=runs.DROPOUT)
    second = FinishedRun(tmp_path, runs.make_job(other_setup, steps=STEPS), first.checkpoints)
    np.testing.assert_allclose(second.losses(), uninterrupted.losses(), rtol=1e-5)


def test_loop_logs_steps_after_last_checkpoint_again(
    setup: runs.StepSetup, uninterrupted: FinishedRun, tmp_path: Path
):
    """A kill between two checkpoints leaves lines of repeated steps, and an incomplete line."""
    first = FinishedRun(tmp_path, runs.make_job(setup, steps=STEPS, stop_after=9, save_every=5))
    del first.checkpoints.saved[9]
    with first.metrics_path.open("a") as file:
        file.write('{"step": 10, "lo')
    second = FinishedRun(tmp_path, runs.make_job(setup, steps=STEPS), first.checkpoints)
    assert second.losses() == uninterrupted.losses()


def test_loop_evaluates_saves_and_logs_at_intervals(setup: runs.StepSetup, tmp_path: Path):
    run = FinishedRun(
        tmp_path, runs.make_job(setup, steps=7, eval_every=3, save_every=2, log_every=5)
    )
    assert [line["step"] for line in run.recording.evaluations] == [0, 3, 6, 7]
    assert run.recording.steps == [2, 4, 6, 7] == run.checkpoints.steps()
    assert [line["step"] for line in run.recording.lines] == [1, 5, 7]
    assert [line["step"] for line in read_metrics(run.metrics_path)] == [0, 1, 3, 5, 6, 7, 7]


def test_loop_of_finished_run_does_nothing(
    setup: runs.StepSetup, uninterrupted: FinishedRun, tmp_path: Path
):
    repeated = FinishedRun(tmp_path, runs.make_job(setup, steps=STEPS), uninterrupted.checkpoints)
    assert repeated.result.step == STEPS
    assert not repeated.recording.lines
    assert not repeated.recording.evaluations
    assert not repeated.recording.steps


def test_eval_limit_takes_the_first_sequences(setup: runs.StepSetup, tmp_path: Path):
    run = FinishedRun(tmp_path, runs.make_job(setup, steps=1, eval_limit=2))
    assert run.recording.evaluations[0]["eval_tokens"] == 2 * (runs.LENGTH - 1)


def with_nan_params(state: TrainState) -> TrainState:
    """Return the state with NaN in its final norm."""
    params = dict(state["params"])
    params["final_norm"] = jax.tree.map(lambda leaf: leaf * np.nan, params["final_norm"])
    return {**state, "params": params}


def test_loop_ends_after_consecutive_nonfinite_steps(setup: runs.StepSetup, tmp_path: Path):
    with pytest.raises(PrepError, match="3 steps in a row were skipped, up to step 3") as caught:
        FinishedRun(
            tmp_path,
            runs.make_job(setup, save_every=10),
            state=with_nan_params(runs.make_state(setup)),
        )
    assert caught.value.hint == "a new run, with a lower `optimizer.lr` or more warm-up"
    assert [line["loss"] for line in read_metrics(tmp_path / METRICS_FILE)] == [None] * 3


def test_loop_does_not_save_nonfinite_state(setup: runs.StepSetup, tmp_path: Path):
    checkpoints = runs.MemoryCheckpoints()
    with pytest.raises(PrepError, match="the state after step 1 is not finite"):
        FinishedRun(
            tmp_path,
            runs.make_job(setup, save_every=1),
            checkpoints,
            with_nan_params(runs.make_state(setup)),
        )
    assert checkpoints.steps() == []


def test_loop_saves_only_parameters_without_optimizer_state(setup: runs.StepSetup, tmp_path: Path):
    run = FinishedRun(tmp_path, runs.make_job(setup, steps=2, optimizer_state=False))
    names: Any = run.checkpoints.open(2).leaves
    assert "params.embed.tokens" in names
    assert not [name for name in names if name.startswith("opt_state")]


class Device:
    """A fake device that takes a second per step, during its dispatch if it blocks, else until it is fetched."""

    def __init__(self, step: Any, *, blocks: bool) -> None:
        self.step, self.blocks, self.steps_done = step, blocks, 0.0

    def __call__(self, *arguments: Any) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = self.step(*arguments)
        self.steps_done += self.blocks
        return state, {**metrics, "in_row": Result(self, float(metrics["in_row"]))}


class Result:
    """A metric of a step; fetching it as an integer waits for the step."""

    def __init__(self, device: Device, value: float) -> None:
        self.device, self.value = device, value

    def __int__(self) -> int:
        self.device.steps_done += not self.device.blocks
        return int(self.value)

    def __float__(self) -> float:
        return self.value


@pytest.mark.parametrize(
    ("blocks", "lag"), [(False, loop.METRICS_LAG), (True, loop.CPU_METRICS_LAG)]
)
def test_loop_logs_time_mfu_and_memory_of_steps(
    setup: runs.StepSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: bool, lag: int
):
    """The first line has them too, and so have lines just before a checkpoint, when no further step is in flight."""
    job = replace(runs.make_job(setup, steps=7, save_every=3), peak_step_s=0.4)
    monkeypatch.setattr(loop, "peak_memory_nbytes", lambda sharding: 7 << 30)
    recording = runs.RecordingLog()
    loop_run = Loop(
        job,
        runs.make_state(setup),
        checkpoints=runs.MemoryCheckpoints(),
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 0), recording],
    )
    assert loop_run.metrics_lag == loop.CPU_METRICS_LAG
    loop_run.metrics_lag = lag
    device = Device(loop_run._compile_step(), blocks=blocks)
    loop_run.timer.clock = lambda: device.steps_done
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_run, "_compile_step", lambda: device)
        loop_run.run()
    lines = [line for line in read_metrics(tmp_path / METRICS_FILE) if "loss" in line]
    assert [line["seconds"] for line in lines] == [1.0] * 7
    assert [(line["mfu"], line["memory_bytes"]) for line in lines] == [(0.4, 7 << 30)] * 7
    assert recording.finished_steps == [*range(1, 8)]


class DelayedSave:
    """A PendingSave that ends after it has been asked `polls` times."""

    def __init__(self, polls: int, error: PrepError | None = None) -> None:
        self.polls, self.error = polls, error

    @property
    def is_done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> float:
        if self.error:
            raise self.error
        return 1.0


class DelayedCheckpoints(runs.MemoryCheckpoints):
    """Checkpoints whose saves end later, or fail."""

    save_error: PrepError | None = None

    def start_save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Manifest
    ) -> PendingSave:
        super().start_save(step, leaves, manifest_fields)
        return DelayedSave(2, self.save_error)


def test_loop_takes_steps_during_a_save(
    setup: runs.StepSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reports: list[tuple[int, int]] = []
    monkeypatch.setattr(
        runs.RecordingLog,
        "on_save",
        lambda self, step, seconds: reports.append((step, self.lines[-1]["step"])),
    )
    FinishedRun(tmp_path, runs.make_job(setup, steps=12, save_every=5), DelayedCheckpoints())
    assert [step for step, _ in reports] == [5, 10, 12]
    assert reports[0][1] > 5, "steps are logged before the save of step 5 has ended"
    assert reports[1][1] == reports[2][1] == 12, "the next save waits for the one before"


def test_loop_raises_the_error_of_a_save(setup: runs.StepSetup, tmp_path: Path):
    checkpoints = DelayedCheckpoints()
    checkpoints.save_error = PrepError("the disk is full")
    with pytest.raises(PrepError, match="the disk is full"):
        FinishedRun(tmp_path, runs.make_job(setup, steps=12, save_every=2), checkpoints)
    assert checkpoints.steps() == [2]
    assert max(line["step"] for line in read_metrics(tmp_path / METRICS_FILE)) < 6


# Texts generated during a run: they are those of `Generator`, and do not change the run.

PROMPTS = ("w3 w4 w6", "w90")
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": runs.VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def make_sampler(tokenizer: TextTokenizer, setup: StepSetup, **changes: Any) -> Sampler:
    options: dict[str, Any] = {
        "prompts": PROMPTS,
        "dtype": "float32",
        "max_new_tokens": 5,
        "eos_token_ids": (),
        "decoder_start_id": None,
        **changes,
    }
    return Sampler(
        options.pop("prompts"),
        tokenizer,
        setup.model,
        sharding=setup.forward_config.sharding,
        **options,
    )


def assert_tokens_are_most_likely(
    setup: StepSetup, params: Any, prompt: list[int], text: str, **encoder_inputs: np.ndarray
) -> None:
    """Compare each of five new tokens with the logits of a forward pass without a cache over all tokens."""
    new_ids = [int(word.removeprefix("w")) for word in text.split()]
    assert len(new_ids) == 5
    # Padding does not change logits, so all prompts have one shape.
    tokens = np.zeros((1, 8), np.int32)
    tokens[0, : len(prompt) + 5] = [*prompt, *new_ids]
    logits = model_logits(setup.model, params, {"tokens": tokens, **encoder_inputs})
    before_new = slice(len(prompt) - 1, len(prompt) + 4)
    assert np.argmax(logits[0, before_new, : runs.VOCAB], axis=-1).tolist() == new_ids


def test_sampler_takes_the_most_likely_tokens(tokenizer: TextTokenizer):
    setup = runs.make_setup()
    sampler = make_sampler(tokenizer, setup)
    # The second turn uses the compiled functions with other parameters.
    for seed in range(2):
        params = runs.make_state(setup, seed)["params"]
        samples = sampler.generate(params)
        assert [sample.prompt for sample in samples] == [*PROMPTS]
        for sample in samples:
            assert sample.text.startswith(" "), "it continues the prompt"
            prompt = tokenizer.encode_prompt(sample.prompt)
            assert_tokens_are_most_likely(setup, params, prompt, sample.text)


def test_sampler_reads_prompts_with_the_encoder(tokenizer: TextTokenizer):
    setup = runs.make_setup(T5)
    params = init_params(setup.model, 0)
    sampler = make_sampler(tokenizer, setup, decoder_start_id=0)
    texts = [sample.text for sample in sampler.generate(params)]
    assert not any(text.startswith(" ") for text in texts), "a target continues no text"
    sources = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    for text, source in zip(texts, sources, strict=True):
        encoder_inputs = {"source": np.array([source]), "present": np.ones((1, len(source)), bool)}
        assert_tokens_are_most_likely(setup, params, [0], text, **encoder_inputs)


def test_sampler_generates_fewer_tokens_than_positions(tokenizer: TextTokenizer):
    # The model has 32 positions.
    setup = runs.make_setup()
    params = runs.make_state(setup)["params"]
    (sample,) = make_sampler(
        tokenizer, setup, prompts=(" ".join(["w1"] * 30),), max_new_tokens=64
    ).generate(params)
    assert len(sample.text.split()) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (" ".join(["w1"] * 33), r"a prompt of `log\.samples` has 33 tokens"),
        (" ", r"`log\.samples`: empty prompt"),
    ],
    ids=["long", "no tokens"],
)
def test_impossible_prompts_are_refused(tokenizer: TextTokenizer, prompt: str, message: str):
    with pytest.raises(UsageError, match=message) as caught:
        make_sampler(tokenizer, runs.make_setup(), prompts=(prompt,))
    assert "--" not in caught.value.hint, "an option of `prep generate`"


def test_prompt_that_cannot_be_encoded_is_refused(tokenizer: TextTokenizer):
    with pytest.raises(PrepError, match=r"`log\.samples`: a prompt is not UTF-8 text") as caught:
        make_sampler(tokenizer, runs.make_setup(), prompts=("\ud800",))
    assert "--" not in caught.value.hint


def test_samples_on_a_mesh_that_splits_tokens_are_refused(tokenizer: TextTokenizer):
    setup = runs.make_setup(mesh="fsdp:4,sp:2", attention_options=AttentionOptions("blockwise"))
    with pytest.raises(UsageError, match=r"`log\.samples` is not supported with sp in `mesh`"):
        make_sampler(tokenizer, setup)


def run_loop(setup: StepSetup, log: Path, **changes: Any) -> Loop:
    loop = Loop(
        runs.make_job(setup, steps=5, **changes),
        runs.make_state(setup),
        checkpoints=runs.MemoryCheckpoints(),
        logs=[
            MetricsFileLog(log.with_name("metrics.jsonl"), 0),
            SamplesFileLog(log, 0),
            runs.RecordingLog(),
        ],
    )
    loop.run()
    return loop


def test_loop_samples_at_its_interval_and_at_the_end(tokenizer: TextTokenizer, tmp_path: Path):
    setup, log = runs.make_setup(), tmp_path / "samples.jsonl"
    sampler = make_sampler(tokenizer, setup)
    loop = run_loop(setup, log, sampler=sampler, sample_every=2)
    recording = loop.logs[-1]
    assert isinstance(recording, runs.RecordingLog)
    assert [step for step, _ in recording.samples] == [0, 2, 4, 5]
    assert read_metrics(log) == [
        sample_line(step, sample) for step, samples in recording.samples for sample in samples
    ]
    assert recording.samples[-1][1] == sampler.generate(loop.state["params"])
    assert recording.samples[0][1] != recording.samples[-1][1]


def test_samples_do_not_change_the_run(tokenizer: TextTokenizer, tmp_path: Path):
    setup, log = runs.make_setup(), tmp_path / "samples.jsonl"
    sampled = run_loop(setup, log, sampler=make_sampler(tokenizer, setup), sample_every=1)
    plain = run_loop(setup, log)
    assert not read_metrics(log)
    assert runs.state_bytes(sampled.state) == runs.state_bytes(plain.state)


def test_sampler_renders_conversations(tokenizer: TextTokenizer):
    template = "{% for m in messages %}w2 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
    (tokenizer.path.parent / "chat_template.jinja").write_text(template)
    setup = runs.make_setup()
    params = init_params(setup.model, 0)
    chat = {"messages": [{"role": "user", "content": "w7"}]}
    samples = make_sampler(tokenizer, setup, prompts=(chat, "w2 w7 w5")).generate(params)
    assert [sample.prompt for sample in samples] == ["w2 w7 w5", "w2 w7 w5"]
    assert samples[0].text == samples[1].text
    first = samples[0].text.split()
    stopped = make_sampler(tokenizer, setup, prompts=(chat,), stop_texts=(first[1],))
    assert stopped.generate(params)[0].text.split() == first[:2]


CHAT_RECIPE = """\
model.path = "tiny"
batch.size = 1
optimizer.lr = 1e-3
train.steps = 1
[data]
path = "chats.jsonl"
format = "chat"
seq_length = 16
chat_template = "data.jinja"
template_args = { word = "w9" }
template_date = "2026-01-31"
[log]
samples = [{ messages = [{ role = "user", content = "w7" }] }]
"""


def sampler_of_recipe(tokenizer: TextTokenizer) -> Sampler | None:
    Path("recipe.toml").write_text(CHAT_RECIPE)
    setup = runs.make_setup()
    return build_sampler(
        load_recipe(Path("recipe.toml")).recipe,
        setup.model,
        runs.GPT_NEO,
        files=tokenizer.path.parent,
        sharding=setup.sharding,
    )


def test_sampler_renders_conversations_as_the_data(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the template of the recipe, its variables and its date."""
    monkeypatch.chdir(tmp_path)
    Path("data.jinja").write_text("{{ strftime_now('w%d') }} {{ word }} {{ messages[0].content }}")
    sampler = sampler_of_recipe(tokenizer)
    assert sampler is not None
    assert sampler.prompts == ("w31 w9 w7",)


def test_missing_template_of_samples_names_its_key(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrepError, match="there is no such file") as raised:
        sampler_of_recipe(tokenizer)
    assert raised.value.hint == 'a Jinja file, or "training"'


@pytest.mark.parametrize("chat", [{}, {"messages": []}, {"messages": [1]}, {"text": "w7"}], ids=str)
def test_sampler_rejects_invalid_conversations(tokenizer: TextTokenizer, chat: dict[str, Any]):
    with pytest.raises(PrepError, match=r"log\.samples"):
        make_sampler(tokenizer, runs.make_setup(), prompts=(chat,))
