"""The plan of a training step: its memory, operations, communication, and time, by estimates and by XLA."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prepcli.core.errors import Key, PrepError
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import JsonObject
from prepcli.core.tables import format_table
from prepcli.models.activation_memory import chunk_length
from prepcli.models.attention_kernels import ANY_ACCELERATOR, CPU, DeviceKind
from prepcli.models.lora import build_adapters
from prepcli.models.mesh import (
    MESH_AXES,
    Mesh,
    SliceCounts,
    check_slices,
    parse_mesh,
    parse_slice_counts,
)
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.partition import leaf_spec
from prepcli.models.registry import family_of
from prepcli.models.rules import Rules, activation_rules, check_leaf_rules
from trainer.planning.memory_estimate import MemoryEstimate, estimate_memory, largest_scores
from trainer.planning.memory_inputs import FLOAT32, MemoryInputs
from trainer.planning.model_shapes import PlannedModel
from trainer.planning.step_flops import StepFlops, count_step_flops
from trainer.planning.step_inputs import (
    ITEMSIZES,
    check_patterns,
    run_dropout,
    step_inputs,
    with_adapters,
)
from trainer.planning.step_time import (
    Accelerator,
    AxisTraffic,
    StepTime,
    axis_traffic,
    estimate_step_time,
    tokens_per_step,
)
from trainer.recipe import Recipe


@dataclass(frozen=True, slots=True)
class KindEstimate:
    """A step on one kind of accelerator."""

    kind: Accelerator
    fits: bool  # Whether the estimated peak is within their memory
    time: StepTime  # Time of the step
    tokens_per_s: float  # Tokens of all devices per second, with the tokens of sources
    mfu_full: float  # Model FLOPs utilization, masked pairs counted as in published figures
    mfu_causal: float  # The same without masked pairs


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The plan of a training step."""

    recipe: Recipe  # The recipe, with the planned mesh
    mesh: Mesh  # The mesh without axes of size -1
    inputs: MemoryInputs  # Inputs of the estimates
    memory: MemoryEstimate  # Memory of one device
    device: DeviceKind = ANY_ACCELERATOR  # Kind of the devices
    # Number of slices along each axis of the mesh
    slices: SliceCounts = field(default_factory=dict)

    @property
    def flops(self) -> StepFlops:
        """Operations of all devices."""
        return count_step_flops(self.inputs)

    @property
    def traffic(self) -> tuple[AxisTraffic, ...]:
        """Communication of one device, by mesh axis."""
        return tuple(axis_traffic(self.inputs, self.slices))

    @property
    def tokens(self) -> int:
        """Tokens of a step. See `tokens_per_step`."""
        return tokens_per_step(self.inputs)

    def estimate_on(self, kind: Accelerator) -> KindEstimate:
        """Return the estimate of the step on a kind of accelerator."""
        flops = self.flops
        time = estimate_step_time(
            self.inputs, kind, memory=self.memory, flops=flops, traffic=self.traffic
        )
        peak_step_flops = time.step_s * self.mesh.n_devices * kind.peak_flops
        return KindEstimate(
            kind=kind,
            fits=self.memory.peak <= kind.memory_nbytes,
            time=time,
            tokens_per_s=self.tokens / time.step_s,
            mfu_full=flops.model_flops_of_all_pairs / peak_step_flops,
            mfu_causal=flops.model_flops_of_visible_pairs / peak_step_flops,
        )


def plan_training(
    recipe: Recipe, model: PlannedModel, rules: Rules, *, device: DeviceKind = ANY_ACCELERATOR
) -> TrainingPlan:
    """Plan a training step.

    Args:
        recipe: The recipe. Its mesh has no axis of size -1.
        model: The model to train.
        rules: Partition rules.
        device: Kind of the devices. CPUs compute bfloat16 in float32.

    Raises:
        UsageError: The mesh has an axis of size -1, does not divide a parameter or is not divided by the
            slices, or the batch does not divide among the devices.
    """
    mesh = parse_mesh(recipe.mesh, Key("mesh"))
    slices = parse_slice_counts(recipe.cluster.dcn_mesh)
    check_slices(mesh, slices)
    shapes = model.shapes(mesh, rules)
    check_leaf_rules(rules, {path: leaf.dims for path, leaf in shapes.leaves.items()})
    # With LoRA the patterns are for the adapters, which these leaves do not contain.
    if not recipe.lora.is_enabled:
        check_patterns(recipe.optimizer, shapes.leaves)
    for leaf in shapes.leaves.values():
        # Called for its error: it names the dim that the mesh does not divide.
        leaf_spec(leaf.path, leaf.dims, leaf.shape, mesh=mesh, rules=rules)
    widens_bfloat16 = device.platform == CPU.platform
    inputs = step_inputs(
        recipe,
        shapes,
        mesh=mesh,
        rules=rules,
        device=device,
        widens_bfloat16=widens_bfloat16,
        dropout=run_dropout(recipe, model.config),
    )
    if recipe.lora.is_enabled:
        adapters = _new_adapters(recipe, model, mesh, rules)
        dtype = recipe.lora.base_dtype
        stored = model.config.get("dtype") or model.config.get("torch_dtype")
        itemsize = ITEMSIZES.get(str(stored) if dtype == "stored" else dtype, FLOAT32)
        inputs = with_adapters(inputs, recipe, adapters, stored_itemsize=itemsize)
    return TrainingPlan(
        recipe=recipe,
        mesh=mesh,
        inputs=inputs,
        memory=estimate_memory(inputs),
        device=device,
        slices=slices,
    )


def _new_adapters(
    recipe: Recipe, model: PlannedModel, mesh: Mesh, rules: Rules
) -> Mapping[str, ParamLeaf]:
    """Return the new adapters of a recipe. Adapters of a file are not counted: they take little memory."""
    lora = recipe.lora.new_adapters
    family = family_of(model.config)
    if lora is None:
        return {}
    # Embeddings that are trained as a whole have the padding of the vocabulary.
    config = model.manifest(mesh, rules)["config"]
    return build_adapters(
        family,
        config,
        lora,
        is_tied=model.is_tied,
        scan=model.scan,
        scan_axis=model.scan_axis,
    ).leaves


def with_overrides(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    """Return a recipe with other values of dotted keys, which must be valid."""
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        # `model_copy` of pydantic does not validate values.
        if table:
            changed = getattr(recipe, table).model_copy(update={name: value})
            recipe = recipe.model_copy(update={table: changed})
        else:
            recipe = recipe.model_copy(update={name: value})
    return recipe


def memory_table(run: MemoryInputs, estimated: MemoryEstimate, available: str = "") -> str:
    """Return the estimate of one device's memory as a table.

    Args:
        run: Inputs of the estimate.
        estimated: The estimate.
        available: Text for the memory of the device. Empty omits the row.
    """
    length = run.local_length(run.seq_length)
    chunk = chunk_length(run.head_chunk_size, length)
    layers = count_text(len(run.arch_config.sliding_windows), "layer")
    policy = run.remat_policy if isinstance(run.remat_policy, str) else ", ".join(run.remat_policy)
    sizes = {
        "parameters": estimated.parameters,
        "moments": estimated.moments,
        "gradients and updates": estimated.gradients,
        "batch": estimated.batch,
        f"saved by {layers} (remat {policy})": estimated.saved,
        "one layer at work": estimated.layer,
        # The scores are already counted in `one layer at work`, so the peak does not add them.
        **({f"  of it scores {largest_scores(run)}": estimated.scores} if estimated.scores else {}),
        f"head and loss, {chunk} tokens": estimated.head,
        "peak": estimated.peak,
    }
    rows = [(name, format_bytes(nbytes)) for name, nbytes in sizes.items()]
    rows += [("in host memory", format_bytes(estimated.offloaded))] if estimated.offloaded else []
    rows += [("available", available)] if available else []
    return format_table(rows, ["memory of one device, estimated", ""], right_aligned=[""])


def memory_fields(estimated: MemoryEstimate, available_nbytes: int | None) -> dict[str, int | None]:
    """Return the estimate in bytes, for the JSON object."""
    names = (
        "parameters",
        "moments",
        "gradients",
        "batch",
        "saved",
        "layer",
        "scores",
        "head",
        "peak",
        "offloaded",
    )
    fits = None if available_nbytes is None else estimated.peak <= available_nbytes
    return {name: getattr(estimated, name) for name in names} | {
        "available": available_nbytes,
        "fits": fits,
    }


# Search of the meshes of a number of devices on which a training step fits, the fastest first.


@dataclass(frozen=True, slots=True)
class MeshOption:
    """A mesh on which the step fits, with its plan and its estimate."""

    plan: TrainingPlan
    estimate: KindEstimate


@dataclass(frozen=True, slots=True)
class MeshSearch:
    """The result of a search."""

    # Meshes on which the step fits, the most tokens per second first
    options: tuple[MeshOption, ...]
    num_too_large: int  # Meshes on which it does not fit
    # Number of meshes that do not divide the model or the batch, by the reason
    refusals: Counter[str]


def search_meshes(
    recipe: Recipe, model: PlannedModel, rules: Rules, *, kind: Accelerator, num_devices: int
) -> MeshSearch:
    """Plan a step on every mesh of a number of devices.

    Args:
        recipe: The recipe. Its mesh is not used.
        model: The model to train.
        rules: Partition rules.
        kind: The accelerators.
        num_devices: Number of devices.
    """
    options: list[MeshOption] = []
    refusals: Counter[str] = Counter()
    num_too_large = 0
    for mesh in _meshes_of(num_devices, rules):
        try:
            plan = plan_training(
                with_overrides(recipe, {"mesh": mesh}), model, rules, device=kind.device
            )
        # Meshes with the same first part of the message are counted together.
        except PrepError as error:
            refusals[error.what] += 1
            continue
        estimate = plan.estimate_on(kind)
        if estimate.fits:
            options.append(MeshOption(plan, estimate))
        else:
            num_too_large += 1
    options.sort(key=lambda option: (-option.estimate.tokens_per_s, option.plan.memory.peak))
    return MeshSearch(tuple(options), num_too_large, refusals)


def _meshes_of(num_devices: int, rules: Rules) -> Iterator[str]:
    """Yield the meshes of a number of devices. Meshes with sp are skipped if no rule splits tokens over sp."""
    splits_seq = any("sp" in choice for choice in activation_rules(rules)["seq"])
    # If no rule splits tokens over sp, its devices would repeat the same work.
    axes = MESH_AXES if splits_seq else MESH_AXES[:3]
    for sizes in _factorizations(num_devices, len(axes)):
        yield str(parse_mesh(",".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers with the product `number`, e.g. (1, 4), (2, 2), (4, 1)."""
    if count == 1:
        yield (number,)
        return
    for divisor in (d for d in range(1, math.isqrt(number) + 1) if number % d == 0):
        # The set drops the second root of a square: 2 and 2 for 4.
        for first in sorted({divisor, number // divisor}):
            yield from ((first, *rest) for rest in _factorizations(number // first, count - 1))


# The plan of a compiled training step for one device: its memory and its collectives. Pure.

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# An asynchronous operation is counted at its `-done` line, because only this line has the type of
# the result. A TPU reduces and scatters in a fusion named after both. The all-reduce inside that
# fusion has the operand's type, so `read_collectives` skips the fusion's body.
_COLLECTIVE = re.compile(
    rf"^ +(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) "
    rf"(?:(?P<kind>{_KINDS})(?:-done)?\(|fusion\(.*calls=%?all-reduce-scatter)"
)
_FUSED_REDUCE_SCATTER = re.compile(r"^%?all-reduce-scatter[\w.-]* \(")
# Type and extents of an array in HLO text, e.g. `bf16[8,128]`: bits of an element, and the extents.
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)[a-z\d]*)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Collective:
    """The collective operations of one kind in a compiled step."""

    kind: str  # Name of the operation in HLO, such as all-gather
    count: int  # Operations in the program. One in a loop counts once.
    nbytes: int  # Bytes of their results on one device


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """The compiler's plan of a training step. Bytes are per device."""

    target: str  # The devices, such as `v5p:8x8x4` or `8 CPU devices`
    kernel: str  # Name of the attention kernel
    # Whether accelerators need less: XLA computes bfloat16 in float32 on CPUs, and keeps both
    is_upper_bound: bool
    temp_nbytes: int  # Temporary arrays
    argument_nbytes: int  # The training state and the batch
    output_nbytes: int  # The new training state and the metrics
    alias_nbytes: int  # Outputs that take the place of arguments
    compile_s: float  # Seconds of tracing and compiling
    host_nbytes: int  # Largest resident memory of the process that compiled
    collectives: tuple[Collective, ...]  # The collective operations by kind
    jax_version: str  # Version of jax
    libtpu_version: str  # Version of libtpu, the compiler of TPUs. Empty for other devices.

    @property
    def compiler(self) -> str:
        """The versions that compiled it, e.g. `jax 0.12.0.1, libtpu 0.0.50.1`. Another one may plan other figures."""
        if not self.libtpu_version:
            return f"jax {self.jax_version}"
        return f"jax {self.jax_version}, libtpu {self.libtpu_version}"

    @property
    def peak_nbytes(self) -> int:
        """Bytes that the step needs: temporary arrays, arguments, and outputs that do not alias them."""
        return self.temp_nbytes + self.argument_nbytes + self.output_nbytes - self.alias_nbytes

    def to_json(self) -> JsonObject:
        """Return the plan as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CompiledPlan:
        """Return the plan of a JSON object that `to_json` returned."""
        collectives = tuple(Collective(**collective) for collective in fields["collectives"])
        return cls(**{**fields, "collectives": collectives})


def read_collectives(hlo: str) -> tuple[Collective, ...]:
    """Return the collective operations in the text of a compiled HLO module, sorted by kind."""
    sizes: dict[str, list[int]] = {}
    is_fused = False
    for line in hlo.splitlines():
        if not line.startswith(" "):
            is_fused = bool(_FUSED_REDUCE_SCATTER.match(line))
        elif not is_fused and (match := _COLLECTIVE.match(line)):
            sizes.setdefault(match["kind"] or "reduce-scatter", []).append(
                _type_nbytes(match["type"])
            )
    return tuple(
        Collective(kind, len(nbytes), sum(nbytes)) for kind, nbytes in sorted(sizes.items())
    )


def _type_nbytes(hlo_type: str) -> int:
    """Return the bytes of the arrays in an HLO type, such as `(bf16[2,8]{1,0}, f32[])`."""
    return sum(
        # `pred` has no number of bits and takes a byte. A scalar has no extents: its product is 1.
        math.prod(map(int, filter(None, extents.split(",")))) * int(bits or 8) // 8
        for bits, extents in _ARRAY.findall(hlo_type)
    )
