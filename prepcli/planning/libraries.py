"""Checkpoints of other libraries as data: layouts and formats, places of items, training states, and changed values.

Each library is one entry of LIBRARIES. Readers and writers are functions of an entry. The names and shapes of the
parameters are in tables of `prepcli.models.layouts` and `orbax_layouts`, which have a function per model type.
This module imports no NumPy: every start of `prep` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from prepcli.planning.tensors import NUM_UPDATES, STEP

if TYPE_CHECKING:
    from prepcli.algebra.axis_map import RowScale, Sizes
    from prepcli.planning.manifest_fields import ScaleFields, ScaleRecord, TrainingStateRecord

SIGNIFICANT_DTYPES = ("", "float16", "bfloat16", "float32")
ROOT_DTYPES = ("", "float32", "bfloat16")
# The trees of other libraries, as options name them. A test compares them with the entries of LIBRARIES.
Tree = Literal[
    "hf-flax",
    "easylm",
    "easylm-scanned",
    "maxtext",
    "maxtext-unscanned",
    "tunix",
    "levanter",
    "levanter-unscanned",
    "torchtitan",
]
TREES: tuple[Tree, ...] = get_args(Tree)
HF_LAYOUT = "hf"
Layout = Literal["hf", Tree]
DCP_FORMAT = "dcp"
STREAM_FORMAT = "stream"
ORBAX_FORMAT = "orbax"
TENSORSTORE_FORMAT = "tensorstore"
# Part of a training state that many trainers do not store.
NO_SETTINGS = "settings of the optimizer"
# Value of a leaf, or name of the number with its value.
Constant = str | float | tuple[int, ...]
Case = Literal["always", "clipped", "unclipped", "averages"]


@dataclass(frozen=True, slots=True)
class LayoutScale:
    """A change of the values of a stream, after its cast: a division by a power of a square root, then a sum.

    A layout determines all fields but `significant` by the name of the tensor, so the plan's digest has only the
    number.

    Attributes:
        number: The number under the square root. 1 for a change without a root.
        significant: Dtype whose numbers the values are before the change, if it is narrower than the written dtype.
            Otherwise empty. The way back rounds to it.
        power: Number of divisions. A negative number is for multiplications.
        root_dtype: Dtype of the rounded root, or "".
        offset: Number to add.
    """

    number: int
    significant: str = ""
    power: int = field(default=1, repr=False)
    root_dtype: str = field(default="", repr=False)
    offset: int = field(default=0, repr=False)

    @property
    def is_exact(self) -> bool:
        """Whether the way back returns every value: the root is a power of 2, or the values have a narrower dtype."""
        if self.offset:
            # 1 + 2^-30 is 1 in float32, so that a small value is lost in a sum.
            return False
        if self.significant:
            return True
        if self.power % 2 == 0 and not self.root_dtype:
            return self.number & (self.number - 1) == 0
        root = math.isqrt(self.number)
        return root * root == self.number and root & (root - 1) == 0

    @property
    def formula(self) -> str:
        """The change as text, e.g. `/ sqrt(8)`."""
        if self.offset:
            return f"+ {self.offset}"
        if self.root_dtype and self.power == -1:
            return f"* {self.root_dtype}(sqrt({self.number}))"
        power = f"^{self.power}" if self.power != 1 else ""
        return f"/ sqrt({self.number}){power}"

    @property
    def description(self) -> str:
        """The change as a predicate, e.g. `divides by the square root of 8`."""
        if self.offset:
            return f"adds {self.offset}"
        if self.power < 0:
            return f"multiplies by the square root of {self.number}"
        return f"divides by the square root of {self.number}"

    def of_moment(self, order: int) -> LayoutScale | None:
        """Return the scale of a moment of Adam, or None if the moment keeps its values.

        y = x / s has the gradient dL/dy = s dL/dx. Averages of gradients are multiplied by s, and averages of their
        squares by s^2. E.g. s = 8: a moment of 0.5 becomes 4, and a second moment of 0.25 becomes 16. A sum changes no
        gradient.

        Args:
            order: 1 for averages of gradients, 2 for averages of their squares.
        """
        if self.number == 1:
            return None
        return LayoutScale(self.number, power=-order * self.power, root_dtype=self.root_dtype)

    def fields(self) -> ScaleFields:
        """Return the fields of a record of this scale. Defaults are left out."""
        fields: ScaleFields = {"sqrt": self.number}
        if self.power != 1:
            fields["power"] = self.power
        if self.root_dtype:
            fields["root"] = self.root_dtype
        if self.offset:
            fields["offset"] = self.offset
        return fields


def bind_scale(scale: RowScale, sizes: Sizes) -> LayoutScale:
    """Return the scale of a row with the size of its axis."""
    number = 1
    if scale.atom:
        size = sizes[scale.atom]
        assert isinstance(size, int)
        number = size
    return LayoutScale(number, power=scale.power, root_dtype=scale.root_dtype, offset=scale.offset)


def recorded_scale(record: ScaleFields, significant: str = "") -> LayoutScale:
    """Return the scale in a record. See `LayoutScale.fields`."""
    return LayoutScale(
        record["sqrt"],
        significant,
        record.get("power", 1),
        record.get("root", ""),
        record.get("offset", 0),
    )


def scaled_digests(record: ScaleRecord, num_rows: int) -> tuple[tuple[int, int, str], ...]:
    """Return the digests of changed values: (first row, one past the last, digest)."""
    if "digest" in record:
        return ((0, num_rows, record["digest"]),)
    return tuple((first, stop, digest) for first, stop, digest in record.get("digests", ()))


def is_scale_record(record: ScaleRecord) -> bool:
    """Return whether the values of a record are in range."""
    is_known = record["significant"] in SIGNIFICANT_DTYPES and record.get("root", "") in ROOT_DTYPES
    has_digest = "digests" in record or "digest" in record
    return is_known and has_digest and record["sqrt"] >= 1 and record["lost"] >= 0


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of AdamW at a step.

    Attributes:
        lr: Learning rate of the next update.
        peak_lr: Learning rate after warm-up.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay, before it is scaled by the learning rate.
    """

    lr: float
    peak_lr: float
    b1: float
    b2: float
    eps: float
    weight_decay: float


NO_VALUES = AdamSettings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamNumbers:
    """The numbers of a training state.

    Attributes:
        step: Number of the last step.
        num_updates: Number of updates in the moments. Skipped steps have none.
        settings: Settings of the optimizer. None if they are unknown.
        clip_norm: Maximum norm of gradients, or 0 without clipping. None if it is unknown.
    """

    step: int
    num_updates: int
    settings: AdamSettings | None
    clip_norm: float | None = None

    def record(self, left_out: Sequence[str]) -> TrainingStateRecord:
        """Return the record of a state that came from another library, or goes to one."""
        return {
            "step": self.step,
            "updates": self.num_updates,
            "optimizer": asdict(self.settings) if self.settings else {},
            "left_out": left_out,
        }


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Place of the parameters in the checkpoints of a JAX trainer.

    Attributes:
        item: Name of the item in a step, or "" if the output itself is the item.
        state_item: Name of the item with the optimizer state, or "" if it is in the item of the parameters.
        root: Prefix of the dotted names of leaves.
        suffix: End of the names of leaves, also in a training state.
    """

    item: str
    state_item: str = ""
    root: str = ""
    suffix: str = ""

    def folder(self, step: int, *, has_state: bool = False) -> str:
        """Return the folder of the item in an output: the step if it has two items, or "" for the output itself."""
        if has_state and self.state_item:
            return str(step)
        if not self.item:
            return ""
        return f"{step}/{self.item}"


@dataclass(frozen=True, slots=True)
class OptaxState:
    """The leaves of AdamW in optax, in the item of a JAX trainer. Names are without the suffix of the item.

    Attributes:
        adam: Prefix of the state of Adam: its count, and both moments below `mu` and `nu`. `{clips}` is the number of
            states for clipping before it.
        clip_norm: Maximum norm of gradients if it is unknown.
        collection: Prefix of the parameters' paths in the trees of moments.
        step: Leaf with the number of steps. Empty for a trainer with this number only in the name of the folder.
        constants: Further leaves: dtype, and value or name of a number (see `numbers`).
        empty_nodes: Paths of nodes without leaves.
        has_lists: Whether numbers in the paths of the optimizer state are indices of lists.
        averages: Prefix of the averages of the parameters. Empty for a trainer without averages.
        average_weight: Leaf of averages with a decay that depends on the step. prep has a constant decay.
    """

    adam: str
    clip_norm: float = 0.0
    collection: str = ""
    step: str = "step"
    constants: Mapping[str, tuple[str, Constant]] = field(default_factory=dict)
    empty_nodes: tuple[tuple[str | int, ...], ...] = ()
    has_lists: bool = False
    averages: str = ""
    average_weight: str = ""

    def numbers(self, state: AdamNumbers) -> dict[str, float]:
        """Return the numbers of a state, by the names that leaves and notes use. Unknown settings are 0."""
        clip_norm = self.clip_norm if state.clip_norm is None else state.clip_norm
        return {
            "updates": state.num_updates,
            "clip_norm": clip_norm,
            "clips": int(clip_norm > 0),
            **asdict(state.settings or NO_VALUES),
        }

    def bind(self, state: AdamNumbers) -> OptaxState:
        """Return the leaves of one state, with numbers in place of their names."""
        numbers = self.numbers(state)
        constants: dict[str, tuple[str, Constant]] = {}
        for leaf, (dtype, value) in self.constants.items():
            constants[leaf] = dtype, numbers[value] if isinstance(value, str) else value
        return replace(self, adam=self.adam.format(**numbers), constants=constants)

    @property
    def slots(self) -> tuple[str, str, str]:
        """Prefixes of both moments and of the averages."""
        return f"{self.adam}mu.{self.collection}", f"{self.adam}nu.{self.collection}", self.averages

    @property
    def counters(self) -> dict[str, str]:
        """Leaves of the counters, with the names of these in prep."""
        counters = {f"{self.adam}count": NUM_UPDATES}
        if self.step:
            counters[self.step] = STEP
        return counters


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The training states of a library: their parts, and the notes for the user.

    Attributes:
        missing: Parts of the library's own checkpoints without a counterpart in prep.
        schedule_note: The way to set the learning rate schedule.
        folder_name: Default name of an output, with the step. Empty for the name of other exports.
        has_settings: Whether the settings of the optimizer are a part of the state.
        lost_clipping: Name of the clipping as an unconverted part. Empty if the library has a setting for it.
        restore_notes: Required settings of the library to restore the state, by their case.
        optax: The leaves in the item of a JAX trainer. None for torch.
    """

    missing: tuple[str, ...]
    schedule_note: str
    folder_name: str = ""
    has_settings: bool = True
    lost_clipping: str = ""
    restore_notes: Mapping[Case, str] = field(default_factory=dict)
    optax: OptaxState | None = None


@dataclass(frozen=True, slots=True)
class Library:
    """The checkpoints of a library in one format of files.

    Attributes:
        layouts: Names of its layouts, e.g. with stacked layers and with one leaf per layer.
        file_format: Format of the files.
        title: The checkpoint in a report.
        item: Place of the items of a JAX trainer. None for other files.
        state: Its training states. None if prep has no names for them.
        marker: Tensor of each of its models in a torch distributed checkpoint. Hugging Face has no such name.
        hub_names_hint: The way to save such a checkpoint with the names of Hugging Face.
    """

    layouts: tuple[str, ...]
    file_format: str
    title: str
    item: ItemPlace | None = None
    state: TrainerState | None = None
    marker: str = ""
    hub_names_hint: str = ""


# Trainer of transformers 5.
HUGGING_FACE = Library(
    (HF_LAYOUT,),
    "safetensors",
    "Hugging Face safetensors",
    state=TrainerState(
        missing=("rng_state.pth", "training_args.bin"),
        folder_name="checkpoint-{step}",
        schedule_note="Trainer makes the schedule from its own arguments: set learning_rate {peak_lr:g}, the warm-up"
        " and the steps of the run",
    ),
)
# The form of `torch.distributed.checkpoint.state_dict.get_state_dict` of PyTorch 2.
TORCH_DISTRIBUTED = Library(
    (HF_LAYOUT,),
    DCP_FORMAT,
    "torch distributed checkpoint",
    state=TrainerState(
        missing=("the state of a scheduler", "random state"),
        schedule_note="a scheduler starts at step {step}, with the learning rate {peak_lr:g} after warm-up",
    ),
)
TORCHTITAN = Library(
    ("torchtitan",),
    DCP_FORMAT,
    "torch distributed checkpoint",
    marker="tok_embeddings.weight",
    hub_names_hint="e.g. `checkpoint.last_save_in_hf` in torchtitan",
)
# MaxText 0.2.5 saves one item. `common/train_state_nnx.py` reshapes its state to the layout of a Flax train state.
MAXTEXT = Library(
    ("maxtext", "maxtext-unscanned"),
    ORBAX_FORMAT,
    "Orbax checkpoint for MaxText",
    # The train state has the Flax variables, with the collection `params`, under the key `params`.
    item=ItemPlace("items", root="params.params."),
    state=TrainerState(
        missing=("random state",),
        has_settings=False,
        schedule_note="MaxText makes schedule and optimizer from its settings: opt_type=adamw,"
        " learning_rate={peak_lr:g}",
        # `opt_state` is the list of the states in `optax.adamw`: Adam, weight decay (empty) and schedule.
        optax=OptaxState(
            adam="opt_state.0.",
            collection="params.",
            constants={"opt_state.2.count": ("int32", "updates")},
            empty_nodes=(("opt_state", 1),),
            has_lists=True,
        ),
    ),
)
# Tunix 0.1.7: sft/checkpoint_manager.py saves `nnx.State`. Each of its leaves is a variable with the key `value`.
TUNIX = Library(
    ("tunix",),
    ORBAX_FORMAT,
    "Orbax checkpoint for Tunix",
    item=ItemPlace("model_params", state_item="optimizer_state", suffix=".value"),
    state=TrainerState(
        missing=("random state", "mask of weight decay"),
        lost_clipping="clipping to the norm {clip_norm:g}",
        schedule_note="Tunix makes the schedule from its settings, e.g. with the learning rate {peak_lr:g} after"
        " warm-up",
        restore_notes={
            "always": "Tunix restores it into optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE)"
        },
        # The optimizer of cli/config.py is `optax.inject_hyperparams(optax.adamw)` with a schedule. It reads the
        # settings from its state. `nnx.Optimizer` counts updates.
        optax=OptaxState(
            adam="opt_state.inner_state.0.",
            step="",
            constants={
                "opt_state.count": ("int32", "updates"),
                "opt_state.hyperparams.b1": ("float32", "b1"),
                "opt_state.hyperparams.b2": ("float32", "b2"),
                "opt_state.hyperparams.eps": ("float32", "eps"),
                "opt_state.hyperparams.eps_root": ("float32", 0.0),
                "opt_state.hyperparams.learning_rate": ("float32", "lr"),
                "opt_state.hyperparams.weight_decay": ("float32", "weight_decay"),
                "opt_state.hyperparams_states.learning_rate.count": ("int32", "updates"),
                "step": ("uint32", "updates"),
            },
        ),
    ),
)
# marin-levanter 0.2.20 saves the fields of `TrainerState` in trainer_state.py.
LEVANTER = Library(
    ("levanter", "levanter-unscanned"),
    TENSORSTORE_FORMAT,
    "Levanter checkpoint",
    # A training state has the model in its field `model`.
    item=ItemPlace("", root="model."),
    state=TrainerState(
        missing=("random state",),
        has_settings=False,
        schedule_note="Levanter makes schedule and optimizer from its settings, e.g."
        " optimizer.learning_rate={peak_lr:g}",
        restore_notes={
            "clipped": "Levanter restores it with optimizer.max_grad_norm={clip_norm:g}",
            "unclipped": "Levanter restores it with optimizer.max_grad_norm=null",
            "averages": "Levanter restores the averages with trainer.model_averaging.type=ema",
        },
        # The optimizer of `AdamConfig` in optim/config.py is `optax.inject_hyperparams` around a chain. Clipping by
        # the global norm is the first part of the chain, if there is any, and has no leaves.
        optax=OptaxState(
            adam="opt_state.inner_state.{clips}.",
            # `optimizer.max_grad_norm` by default.
            clip_norm=1.0,
            constants={
                "opt_state.count": ("int32", "updates"),
                # Levanter computes the learning rate anew in each step.
                "opt_state.hyperparams.learning_rate": ("float32", "lr"),
                "opt_state.hyperparams_states.learning_rate.count": ("int32", "updates"),
                # `jax.random.PRNGKey(0)`.
                "training_key": ("uint32", (0, 0)),
            },
            averages="model_averaging.model.",
            average_weight="model_averaging.tot_weight",
        ),
    ),
)

# A layout has the formats of its entries. The first one is the default.
LIBRARIES = (
    HUGGING_FACE,
    TORCH_DISTRIBUTED,
    Library(("hf-flax",), "msgpack", "Flax msgpack for Hugging Face"),
    Library(("easylm", "easylm-scanned"), STREAM_FORMAT, "EasyLM stream"),
    TORCHTITAN,
    MAXTEXT,
    TUNIX,
    LEVANTER,
)


LIBRARIES_BY_LAYOUT: dict[str, list[Library]] = {}
for _library in LIBRARIES:
    for _layout in _library.layouts:
        LIBRARIES_BY_LAYOUT.setdefault(_layout, []).append(_library)


def find_library(layout: str, file_format: str | None = None) -> Library:
    """Return the entry of a known layout, in a format of this layout or in its default format."""
    entries = LIBRARIES_BY_LAYOUT[layout]
    return next((entry for entry in entries if entry.file_format == file_format), entries[0])


def find_marked_library(tensors: Collection[str]) -> Library | None:
    """Return the library with these names in a torch distributed checkpoint, or None for Hugging Face."""
    for library in LIBRARIES:
        if library.marker and library.marker in tensors:
            return library
    return None
