"""Tiny training runs: a small model, data in memory, and checkpoints in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from prepcli.algebra.boxes import Box
from prepcli.engine.blobs import HostLeaf
from prepcli.execution.checkpoint_manager import FinishedSave
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import merge_rules
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.tensors import LeafSpec
from trainer.data.order import RowOrder
from trainer.data.packing import PackedDataset
from trainer.data.store import MappedTokens
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.initialization import init_params
from trainer.nn.model_spec import ForwardConfig, build_model
from trainer.recipe.lr_schedule import LRSchedule
from trainer.recipe.optimizer_tables import AdamWTable
from trainer.recipe.tables import Checkpoint, Eval, Log, Recipe, Train
from trainer.training.checkpoint import PendingSave, round_params
from trainer.training.events import LoopConfig
from trainer.training.metrics import EvaluationResult, RunLog, Sample, StepLine, evaluation_line
from trainer.training.optimizers import Optimizer
from trainer.training.step import StepSetup, TrainState, init_train_state, leaf_name, state_shapes

VOCAB, PADDED, LENGTH, N_BLOCKS = 131, 136, 16, 50
# One layer of each kind: layers that are not scanned take time to compile.
GPT_NEO: dict[str, Any] = {
    "model_type": "gpt_neo",
    "vocab_size": PADDED,
    "true_vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 32,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": PADDED,
    "true_vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
CONFIGS = {config["model_type"]: config for config in (GPT_NEO, LLAMA, MIXTRAL)}
DROPOUT = DropoutConfig(attention=0.1, residual=0.1, embedding=0.1, fcm_ratio=(0.0, 0.3))
ADAMW = Optimizer(
    AdamWTable(lr=1e-2, b1=0.9, b2=0.95, weight_decay=0.1),
    LRSchedule(peak=1e-2, end=1e-3, kind="cosine", warmup=3, decay=20),
)


def make_setup(
    config: Mapping[str, Any] = GPT_NEO,
    mesh: str = "",
    accumulate: int = 1,
    *,
    rules: Sequence[str] = (),
    dropout: DropoutConfig = NO_DROPOUT,
    optimizer: Optimizer = ADAMW,
    param_dtype: str = "float32",
    **forward_options: Any,
) -> StepSetup:
    """Return the setup of a tiny model, on a mesh of CPU devices or on one device."""
    sharding = (
        make_sharding_context(parse_mesh(mesh), merge_rules(rules)) if mesh else ShardingContext()
    )
    family = FAMILIES[config["model_type"]]
    model = build_model(family, config, family.is_tied(config))
    forward_config = ForwardConfig(sharding=sharding, head_chunk_size=5, **forward_options)
    return StepSetup(
        model,
        forward_config,
        optimizer,
        accumulate,
        dropout=dropout,
        seed=7,
        param_dtype=param_dtype,
    )


def make_state(setup: StepSetup, seed: int = 0) -> TrainState:
    """Return the state before the first step, with random parameters."""
    params = jax.device_put(_params(setup.model.family.name, seed))
    state = init_train_state(round_params(params, setup), setup)
    if setup.forward_config.sharding.device_mesh is None:
        return state
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup)))


@lru_cache
def _params(name: str, seed: int) -> Tree:
    """Return random parameters on the host.

    They are made operation by operation: leaves of equal shapes share what is compiled.
    """
    config, family = CONFIGS[name], FAMILIES[name]
    model = build_model(family, config, family.is_tied(config))
    return jax.device_get(init_params(model, seed))


def make_tokens(seed: int = 0) -> MappedTokens:
    """Return N_BLOCKS blocks of a learnable sequence: each id is the previous one plus 0, 1 or 2."""
    random = np.random.default_rng(seed)
    ids = np.cumsum(random.integers(0, 3, N_BLOCKS * LENGTH)) % VOCAB
    ends = np.array([ids.size], "<u8")
    return MappedTokens(
        ids=ids.astype("<u2"), ends=ends, identity=f"identity {seed}", seq_length=LENGTH
    )


def make_job(
    setup: StepSetup,
    batch_size: int = 8,
    steps: int = 20,
    *,
    log_every: int = 1,
    max_skipped: int = 3,
    eval_limit: int = 0,
    eval_at_start: bool | None = None,
    optimizer_state: bool = True,
    also_save_every: tuple[int, int] = (0, 0),
    saves_best: bool = False,
    saved_dtype: str | None = None,
    sample_every: int = 0,
    **changes: Any,
) -> LoopConfig:
    """Return the config of a run over the blocks of `make_tokens`, the last five of them for evaluation."""
    tokens = make_tokens()
    train = PackedDataset(tokens, first_row=0, n_rows=N_BLOCKS - 5)
    milestones, export_every = also_save_every
    recipe = Recipe.model_construct(
        train=Train.model_construct(log_every=log_every, max_skipped=max_skipped),
        eval=Eval(limit=eval_limit, at_start=eval_at_start),
        checkpoint=Checkpoint.model_construct(
            optimizer_state=optimizer_state,
            milestones=milestones,
            export_every=export_every,
            best="eval_loss" if saves_best else None,
            dtype=saved_dtype or setup.param_dtype,
        ),
        log=Log.model_construct(sample_every=sample_every),
    )
    config = LoopConfig(
        setup=setup,
        recipe=recipe,
        steps=steps,
        order=RowOrder(n_rows=train.n_rows, batch_size=batch_size, seed=1, shuffle=True),
        train=train,
        evaluation=PackedDataset(tokens, first_row=train.n_rows, n_rows=5),
        eval_every=0,
        save_every=0,
        manifest_fields=Manifest(),
    )
    return replace(config, **changes)


@dataclass
class MemoryReader:
    """A CheckpointReader of arrays in memory."""

    arrays: Mapping[str, np.ndarray]
    manifest: Manifest = field(default_factory=Manifest)
    is_remote: bool = False
    read_units: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        return {
            name: LeafSpec(array.shape, array.dtype.name, self.read_units.get(name, ()))
            for name, array in self.arrays.items()
        }

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        for box, array in parts.items():
            array[...] = self.arrays[name][tuple(slice(*ends) for ends in box)]

    def stop_reads(self) -> None:
        """Do nothing: a read of memory takes no time."""


@dataclass
class MemoryCheckpoints:
    """Checkpoints in memory."""

    saved: dict[int, MemoryReader] = field(default_factory=dict)

    def steps(self) -> list[int]:
        return sorted(self.saved)

    def open(self, step: int) -> MemoryReader:
        return self.saved[step]

    def start_save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Manifest
    ) -> PendingSave:
        assert step not in self.saved
        self.saved[step] = MemoryReader(
            {name: leaf.fetch().copy() for name, leaf in leaves.items()}, manifest_fields
        )
        return FinishedSave(0.0)

    def note_evaluations(self, metric: str, costs: Mapping[int, float]) -> None:
        """Keep all steps, whatever their costs are."""


@dataclass
class RecordingLog(RunLog):
    """Log that records all events."""

    lines: list[StepLine] = field(default_factory=list)
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finished_steps: list[int] = field(default_factory=list)
    samples: list[tuple[int, list[Sample]]] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)

    def on_compile(self, seconds: float) -> None:
        assert seconds > 0

    def on_step(self, step: int, remaining_s: float | None) -> None:
        self.finished_steps.append(step)

    def on_progress(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        self.lines.append(line)

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        self.evaluations.append(evaluation_line(step, result))

    def on_samples(self, step: int, samples: Sequence[Sample], num_new: int) -> None:
        self.samples.append((step, list(samples)))

    def on_save(self, step: int, seconds: float) -> None:
        self.steps.append(step)


def state_bytes(state: TrainState | Tree) -> dict[str, bytes]:
    """Return the bytes of every leaf of a state or of a part of it, by name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {leaf_name(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
