"""The description of a run: lines before its first step, and the machine and versions that its files record."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.algebra.axis_map import dim_name
from prepcli.core import package_versions
from prepcli.core.errors import Command, Option, text
from prepcli.core.formatting import count_text, format_bytes
from prepcli.models.activation_memory import WHOLE
from prepcli.models.architecture import ArchConfig
from prepcli.models.attention_kernels import KernelChoice
from prepcli.models.layer_config import DROPOUT_SITES, DropoutConfig
from prepcli.models.rope_config import Rope
from prepcli.models.rules import rule_texts
from prepcli.planning.manifest_fields import CastCounts
from trainer.data.packing import ConcatenatedDataset, Dataset, DocumentDataset, PackedDataset
from trainer.data.sample_text import counts_table, sample_line
from trainer.data.seq2seq import Seq2SeqDataset
from trainer.data.store import MappedTokens
from trainer.recipe.description import data_lines, evaluation_text, schedule_text
from trainer.run.logs import write_run_file
from trainer.run.run import Run
from trainer.run.run_record import ENVIRONMENT_FILE

if TYPE_CHECKING:
    from prepcli.models.param_tree import ParamLeaf
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import AttentionOptions, ModelSpec
    from trainer.run.start import StartCheckpoint
    from trainer.training.events import LoopConfig
    from trainer.training.step import StepSetup

# Left out of the recorded flags: the mesh has the number of devices already.
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def write_environment(run: Run, config: LoopConfig, step: int) -> None:
    """Write the environment of the current start of a run, which continues after a step.

    Raise PrepError if it cannot be written.
    """
    forward_config = config.setup.forward_config
    sharding = config.setup.sharding
    assert sharding.device_mesh is not None
    environment_fields = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_at": step,
        "steps": config.steps,
        "host": socket.gethostname(),
        "processes": run.group.count,
        "devices": sharding.device_mesh.size,
        "device_kind": sharding.device_mesh.devices.flat[0].device_kind,
        "mesh": str(sharding.mesh),
        "attention_kernel": forward_config.attention_options.kernel,
        "parameters": _num_elements(config.setup.model.leaves),
        "trained_parameters": _num_elements(config.setup.trained_leaves),
        "data": {
            "train_sequences": config.train.n_rows,
            "eval_sequences": config.evaluation.n_rows if config.evaluation else 0,
            "batch_sequences": config.order.batch_size,
            "tokens_per_step": config.tokens_per_step,
            "digest": config.manifest_fields.data,
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name, version in package_versions().items() if version},
    }
    text = json.dumps(environment_fields, indent=1) + "\n"
    write_run_file(run, ENVIRONMENT_FILE, text)


def _num_elements(leaves: Mapping[str, ParamLeaf]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def rounding_environment(sharding: ShardingContext) -> dict[str, str | int]:
    """Return the kind of device, the versions of JAX, XLA's flags and, for CPUs, the cores of this process."""
    from trainer.distributed.exact_reduction import xla_flags

    assert sharding.device_mesh is not None
    device = sharding.device_mesh.devices.flat[0]
    flags = [flag for flag in xla_flags().split() if not flag.startswith(DEVICE_COUNT_FLAG)]
    environment: dict[str, str | int] = {
        "device": device.device_kind,
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "xla_flags": " ".join(sorted(flags)),
    }
    if device.platform == "cpu":
        # XLA splits a CPU's matrix products among the cores, and the split changes the order of its sums.
        environment["cores"] = len(os.sched_getaffinity(0))
    return environment


# First samples, one of each source of a mixture.
MAX_SAMPLES = 4
# Characters of all first samples: 7 lines of 80 with their labels.
MAX_SAMPLE_CHARS = 540
# Tokens of a first sample.
SAMPLE_TOKENS = (256, 128, 64, 32, 16, 8)


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The token store of a dataset, and how its documents become rows."""

    tokens: MappedTokens  # The store
    source_length: int  # Maximum tokens of a source. 0 without an encoder.
    has_blocks: bool  # Whether documents are concatenated and cut into blocks


def token_stores(train: Dataset) -> dict[str, TokenStore]:
    """Return the token store of each source by name, `train` without a mixture. Span corruption has none."""
    parts: Mapping[str, Dataset] = {"train": train}
    if isinstance(train, ConcatenatedDataset):
        parts = train.parts
    stores: dict[str, TokenStore] = {}
    for name, part in parts.items():
        if isinstance(part, Seq2SeqDataset):
            stores[name] = TokenStore(part.tokens, part.source_length, has_blocks=False)
        elif isinstance(part, PackedDataset | DocumentDataset):
            has_blocks = isinstance(part, PackedDataset)
            stores[name] = TokenStore(part.tokens, 0, has_blocks=has_blocks)
    return stores


def note_summary(
    run: Run,
    start: StartCheckpoint,
    config: LoopConfig,
    kernel: KernelChoice,
    *,
    is_finished: bool,
) -> None:
    """Describe a run to its user before the first step. A finished run has no further step."""
    for line in _summary_lines(run, start, config, kernel):
        run.observer.note(line)
    if is_finished:
        run.observer.note(f"the run is finished at step {start.steps_taken}")
    elif start.steps_taken:
        run.observer.note(f"resuming at step {start.steps_taken}")


def _summary_lines(
    run: Run, start: StartCheckpoint, config: LoopConfig, kernel: KernelChoice
) -> Iterator[str]:
    """Yield lines that describe a run: mesh, rules, model, attention kernel, batch, evaluation and data."""
    setup = config.setup
    yield from _mesh_lines(setup)
    for line in (
        adapters_text(setup.model),
        rope_text(setup.model.arch_config),
        dropout_text(setup.dropout),
    ):
        if line:
            yield line
    yield attention_text(kernel, setup.forward_config.attention_options)
    size = config.order.batch_size
    length = config.tokens_per_step // size
    parts = ""
    if config.setup.accumulate > 1:
        parts = f" in {config.setup.accumulate} parts"
    epochs = config.steps / config.order.steps_per_epoch
    batch_text = (
        f"batch {size} x {length} = {count_text(config.tokens_per_step, 'token')} per step{parts};"
        f" {count_text(config.steps, 'step')} = {epochs:.2f} epochs of {count_text(config.train.n_rows, 'sequence')}"
    )
    yield batch_text
    yield schedule_text(setup.optimizer.lr_schedule)
    if config.evaluation is not None:
        n_rows = config.evaluation.n_rows
        limit = run.recipe.eval.limit or n_rows
        yield evaluation_text(run.recipe, min(n_rows, limit))
    yield from data_lines(run.recipe.data, is_read=True)
    if run.is_process_0:
        folder = run.recipe.data.tokenizer or start.tokenizer_folder
        yield from _sample_counts_lines(config.train, Path(folder))


def _sample_counts_lines(train: Dataset, tokenizer: Path) -> Iterator[str]:
    """Yield the counts of the training data, and the first sample of each source with its tokens with loss marked."""
    # Data without loss weights has none: the line of its tokens says all.
    from trainer.data.token_samples import count_samples

    stores = token_stores(train)
    weighted = {name: part for name, part in stores.items() if part.tokens.weight_codes is not None}
    if not weighted:
        return
    counts = {
        name: count_samples(
            part.tokens, source_length=part.source_length, has_blocks=part.has_blocks
        )
        for name, part in stores.items()
    }
    yield from counts_table(counts, None).split("\n")
    yield from _sample_lines(weighted, tokenizer, is_mixture=len(stores) > 1)


def _sample_lines(
    stores: Mapping[str, TokenStore], tokenizer_path: Path, *, is_mixture: bool
) -> Iterator[str]:
    """Yield the first sample of each store, up to MAX_SAMPLES."""
    shown = list(stores)[:MAX_SAMPLES]
    for name in shown:
        sample = _short_sample(stores[name], tokenizer_path, MAX_SAMPLE_CHARS // len(shown))
        if not sample:
            continue
        label = "first sample"
        if is_mixture:
            label += f" of {name}"
        yield f"{label}: {sample}"
    if len(stores) > len(shown):
        command = Command("tokenize", "RECIPE", Option("show", 1))
        others = count_text(len(stores) - len(shown), "other source")
        yield text("{} shows the first samples of {}", command, others)


def _short_sample(store: TokenStore, tokenizer_path: Path, max_chars: int) -> str:
    """Return the first sample of a store in a few lines, as many tokens of both of its ends as fit."""
    from trainer.data.token_samples import read_samples
    from trainer.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    line = ""
    for max_tokens in SAMPLE_TOKENS:
        for sample in read_samples(
            store.tokens,
            tokenizer,
            1,
            source_length=store.source_length,
            max_tokens=max_tokens,
        ):
            line = sample_line(sample)
        if len(line) <= max_chars:
            break
    return line


def _mesh_lines(setup: StepSetup) -> Iterator[str]:
    """Yield the mesh with the memory of the state, and the partition rules. Without a mesh there are no lines."""
    from trainer.training.step import state_nbytes_per_device

    sharding = setup.forward_config.sharding
    mesh = sharding.mesh
    if mesh is None:
        return
    axes = " x ".join(f"{name} {extent}" for name, extent in zip(mesh.names, mesh.sizes))
    state_size = format_bytes(state_nbytes_per_device(setup))
    devices = count_text(mesh.n_devices, "device")
    yield f"mesh {axes} = {devices}; {state_size} of parameters and moments per device"
    dims: set[str] = set()
    for leaf in setup.model.leaves.values():
        # A rule for a dim of other models, e.g. `experts`, has no effect and is not shown.
        dims.update(map(dim_name, leaf.dims))
    yield f"rules {', '.join(rule_texts(sharding.rules, dims))}"


def adapters_text(model: ModelSpec) -> str:
    """Return the adapters of a model and their size as text. Empty without adapters."""
    if model.adapters is None:
        return ""
    lora = model.adapters.config
    trained = sum(math.prod(leaf.shape) for leaf in model.saved_leaves.values())
    total = sum(math.prod(leaf.shape) for leaf in model.leaves.values())
    experts = [f"{name} of experts" for name in lora.target_parameters]
    targets = ", ".join((*lora.targets, *experts))
    parts = [f"adapters of rank {lora.rank} for {targets}, scaled by {lora.scaling:g}"]
    for pattern, rank in lora.rank_pattern.items():
        parts.append(f"rank {rank} for {pattern}")
    for pattern, alpha in lora.alpha_pattern.items():
        parts.append(f"alpha {alpha:g} for {pattern}")
    if lora.modules_to_save:
        parts.append(f"{', '.join(lora.modules_to_save)} trained as a whole")
    parts.append(f"{trained:,} of {total:,} parameters are trained")
    return "; ".join(parts)


def rounding_text(counts: CastCounts) -> str:
    """Return the numbers of rounded and of changed parameters as text."""
    change = f"{counts['changed']:,} of {counts['values']:,} values changed"
    return f"parameters {counts['from']} -> {counts['to']}: {change}"


def attention_text(kernel: KernelChoice, options: AttentionOptions) -> str:
    """Return an attention kernel, the reason for it, and the sizes of its tiles as text."""
    if not options.spec.has_tiles:
        return str(kernel)
    queries = _size_text(options.q_chunk_size)
    keys = _size_text(options.k_chunk_size)
    return f"{kernel}, tiles of {queries} queries x {keys} keys"


def _size_text(size: int) -> str:
    if size == WHOLE:
        return "all"
    return str(size)


def rope_text(arch_config: ArchConfig) -> str:
    """Return the rotary embeddings of a model and its positions as text. Empty without rotary embeddings."""
    if not arch_config.ropes:
        return ""
    ropes = " and ".join(_describe_rope(rope) for rope in arch_config.ropes if rope.rotary_dim)
    return f"rotary embedding {ropes}; {count_text(arch_config.max_positions, 'position')}"


def dropout_text(dropout: DropoutConfig) -> str:
    """Return the rates of dropout and forgetful causal masking as text. Empty without both."""
    rates: list[str] = []
    for site in DROPOUT_SITES:
        rate = getattr(dropout, site)
        if rate:
            rates.append(f"{site} {rate:g}")
    if dropout.adapters:
        rates.append(f"adapters {dropout.adapters:g}")
    parts: list[str] = []
    if rates:
        parts.append(f"dropout {', '.join(rates)}")
    low, high = dropout.fcm_ratio
    if high:
        parts.append(f"forgetful causal masking of {low:g} to {high:g} of the keys")
    return "; ".join(parts)


def _describe_rope(rope: Rope) -> str:
    details = [f"theta {rope.theta:,.10g}"]
    # longrope has a list with one factor per frequency, and no single factor.
    if rope.rope_type not in ("default", "longrope"):
        details.append(f"factor {rope.factor:g}")
    # Linear scaling divides every position by the factor, whatever length the model was trained with.
    if rope.rope_type not in ("default", "linear"):
        details.append(f"original positions {rope.original_max_positions:,}")
    return f"{rope.rope_type} ({', '.join(details)})"
