"""The recipe tables `[model]` and `[lora]`: the model to start from, its computation, rotary embedding and adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from prepcli.core.errors import INVALID_CONFIG, Command, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.activation_memory import Offload, PolicyName
from prepcli.models.architecture import ArchConfig
from prepcli.models.lora_config import DEFAULT_TARGETS, LoraConfig
from prepcli.models.registry import family_of
from prepcli.models.rope_config import MAX_FLOAT32, Rope
from trainer.recipe.key_types import (
    MAX_VALUE_CHARS,
    STRICT,
    ActivationNames,
    DropoutRates,
    MayChange,
    NonNegativeInt,
    OptionalChunkSize,
    PathText,
    PositiveFloat,
    PositiveInt,
    RatioRange,
    RuleTexts,
    UnitInterval,
    if_absent,
    parse_table,
)

# Default of `alpha`.
# The scale alpha / rank is then 2 for every rank.
ALPHA_PER_RANK = 2
SCALING_KEY = "model.rope_scaling"
THETA_KEY = "model.rope_theta"
POSITIONS_KEY = "model.max_position_embeddings"
ROPE_KEYS = (SCALING_KEY, THETA_KEY, POSITIONS_KEY)
ORIGINAL = "original_max_position_embeddings"
# Keys of the config that another scaling does not replace.
KEPT_KEYS = ("rope_theta", "partial_rotary_factor")
# Pairs of keys: the value of the first one must be the smaller one.
ORDERED_KEYS = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
THETA_FIELDS = ("rope_theta", "rotary_emb_base")
# transformers 4 reads theta outside of the scaling, transformers 5 inside of `rope_parameters`.
VERSION_4_THETA = ("rope_theta", "rope_scaling")
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx")
OTHER_VALUE_HINT = "set another value, or remove the key from the recipe"
# NTK-aware scaling stretches the lowest frequency theta^(-(d - 2)/d) by the factor and keeps the
# highest one, which theta * factor^(d / (d - 2)) does.
NTK_HINT = "`model.rope_theta` = theta * factor ** (d / (d - 2)), for heads with d rotated elements"

ReadArch = Callable[[HFConfig], ArchConfig]
Factor = Annotated[float, Field(gt=0, le=MAX_FLOAT32, examples=[4.0])]
# One factor per rotated pair of elements
Factors = Annotated[list[Factor], Field(examples=[[1.0, 1.5]])]
Positions = Annotated[PositiveInt, Field(examples=[4096])]


# --- The tables


class Model(BaseModel):
    """The model to start from, and how it is computed."""

    model_config = STRICT

    path: MayChange[PathText | None] = Field(
        default=None,
        description="a checkpoint of any format: a path, a hub id, or a URL",
        examples=["gpt-neo-1.3B-init"],
        json_schema_extra=if_absent('no checkpoint, with `init = "random"`'),
    )
    lock: MayChange[PathText | None] = Field(
        default=None,
        description="a lock file. A checkpoint that differs from it in any byte is an error",
        examples=["gpt-neo-1.3B.lock.json"],
        json_schema_extra=if_absent("no lock"),
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint",
        description="initial parameters: those of `path`, or random ones of the model of `preset` or `config`",
        examples=["random"],
    )
    training_state: bool = Field(
        default=False,
        description="start with the moments and the step of `path`, and not with its parameters alone. `path` is a "
        "step of a run, or the output of a conversion with its training state",
        examples=[True],
    )
    preset: str | None = Field(
        default=None,
        description="name of a published config, for a random start",
        examples=["llama-7b"],
        json_schema_extra=if_absent("no preset"),
    )
    config: PathText | None = Field(
        default=None,
        description="a config.json, or a folder that contains one, for a random start",
        examples=["my-model/config.json"],
        json_schema_extra=if_absent("the config of `path` or `preset`"),
    )
    overrides: dict[str, Any] | None = Field(
        default=None,
        description="keys of the config.json with other values",
        examples=[{"num_hidden_layers": 4}],
        json_schema_extra=if_absent("no changes"),
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="dtype of the computation. Parameters keep `param_dtype`. `float16` has `optimizer.loss_scale`",
        examples=["bfloat16"],
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of the trained parameters in device memory and checkpoints. Updates are computed in "
        "float32 and rounded to bfloat16 stochastically. Averages of `optimizer.ema` stay float32",
        examples=["bfloat16"],
    )
    scan_layers: MayChange[bool] = Field(
        default=True,
        description="compile one layer and loop over it. `false`: unroll all layers",
        examples=[True],
    )
    remat_policy: MayChange[PolicyName | ActivationNames] = Field(
        default="none",
        description="activations that a layer saves for its backward pass besides its input: a name of "
        "`jax.checkpoint_policies`, or a list of activations. `none`: all but those of norms and activation functions",
        examples=["nothing_saveable"],
    )
    offload: MayChange[Offload] = Field(
        default="none",
        description="`residuals`: save the inputs of layers in pinned host memory instead of device memory",
        examples=["residuals"],
    )
    head_chunk_size: MayChange[OptionalChunkSize] = Field(
        default=None,
        description="tokens of a device per row whose logits and loss are computed at a time. `-1`: all",
        examples=[512],
    )
    ffn_chunk_size: MayChange[PositiveInt | Literal[-1]] = Field(
        default=-1,
        description="tokens of a device per row whose projections and MLP are computed at a time. `-1`: all",
        examples=[2048],
    )
    attention_kernel: MayChange[
        Literal["auto", "reference", "blockwise", "cudnn", "pallas-splash"]
    ] = Field(
        default="auto",
        description="`auto`: the best kernel for the devices, the model and the length. `reference`: the scores of "
        "all queries and keys at once. `blockwise`: tile by tile, with memory linear in the length. `cudnn`: flash "
        "attention of cuDNN. `pallas-splash`: splash attention on TPUs",
        examples=["blockwise"],
    )
    q_chunk_size: MayChange[OptionalChunkSize] = Field(
        default=None,
        description="queries of a tile of blockwise attention. `-1`: all",
        examples=[1024],
    )
    k_chunk_size: MayChange[OptionalChunkSize] = Field(
        default=None,
        description="keys of a tile of blockwise attention. `-1`: all",
        examples=[1024],
    )
    rope_scaling: dict[str, Any] | None = Field(
        default=None,
        description="scaling of the rotary embedding for longer contexts, with the keys of `rope_scaling` or "
        "`rope_parameters` in a config.json. `rope_type` is default, linear, dynamic, llama3, yarn or longrope",
        examples=[{"rope_type": "yarn", "factor": 4.0}],
        json_schema_extra=if_absent("the checkpoint's"),
    )
    rope_theta: PositiveFloat | None = Field(
        default=None,
        description="base of the rotary frequencies. NTK-aware scaling raises it",
        examples=[500000],
        json_schema_extra=if_absent("the checkpoint's"),
    )
    max_position_embeddings: PositiveInt | None = Field(
        default=None,
        description="sequence length that the model with the changed rotary embedding is made for",
        examples=[32768],
        json_schema_extra=if_absent("the checkpoint's"),
    )
    dropout: DropoutRates = Field(
        default=0.0,
        description="rate of dropout of attention probabilities, residuals (outputs of attention and MLP) and "
        "embeddings, or a table with the rates `attention`, `residual` and `embedding`. `config`: the rates of the "
        "checkpoint's config.json",
        examples=[0.1],
    )
    fcm_ratio: RatioRange = Field(
        default=(0.0, 0.0),
        description="forgetful causal masking: smallest and largest fraction of the keys of a sequence that are hidden "
        "from all queries in training",
        examples=[[0.0, 0.15]],
    )

    @property
    def is_random(self) -> bool:
        """Whether the initial parameters are random."""
        return self.init == "random"


class Lora(BaseModel):
    """Low-rank adapters (LoRA). With `rank` or `path` only they are trained. All other parameters are frozen."""

    model_config = STRICT

    rank: NonNegativeInt = Field(
        default=0,
        description="rank of the adapters. `0`: none, all parameters are trained",
        examples=[16],
    )
    alpha: PositiveFloat | None = Field(
        default=None,
        description="scale of the adapters: alpha / rank times B A is added to a weight",
        examples=[32],
        json_schema_extra=if_absent("2 x `rank`"),
    )
    targets: RuleTexts = Field(
        default=DEFAULT_TARGETS,
        description="projections with an adapter, as patterns: `attn.q`, `attn.k`, `attn.v`, `attn.o`, `cross.*`, "
        "`mlp.gate`, `mlp.up`, `mlp.down`. Those that the checkpoint stores in one tensor are adapted together. "
        "In latent attention (DeepSeek) `attn.q` is `attn.q_up`, and `attn.k` and `attn.v` are `attn.kv_up`. "
        "`all-linear`: all projections of the layers, without experts and head, as in PEFT",
        examples=[["attn.*", "mlp.*"], "all-linear"],
    )
    target_parameters: RuleTexts = Field(
        default=(),
        description="projections of experts with an adapter for each expert, as patterns: `mlp.gate`, `mlp.up`, "
        "`mlp.down`. PEFT has this key for experts in one tensor",
        examples=[["mlp.*"]],
    )
    dropout: UnitInterval = Field(
        default=0.0,
        description="fraction of the input of each adapter to drop in training. Evaluation drops none",
        examples=[0.05],
    )
    rank_pattern: dict[str, PositiveInt] = Field(
        default={},
        description="rank of some adapters in place of `rank`, by a regular expression. An adapter has the rank of the "
        "first key that is the end of its name, as in PEFT: `attn.q`, or the PyTorch module's `q_proj`",
        examples=[{"mlp.down": 32}],
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        default={},
        description="alpha of some adapters in place of `alpha`, by a regular expression as in `rank_pattern`",
        examples=[{"mlp.down": 64}],
    )
    modules_to_save: RuleTexts = Field(
        default=(),
        description="embeddings and head that are trained as a whole: `embed.tokens`, `embed.positions`, `head`. A "
        "tied head is trained with `embed.tokens`",
        examples=[["embed.tokens", "head"]],
    )
    use_rslora: bool = Field(
        default=False,
        description="scale by alpha / sqrt(rank) instead of alpha / rank",
        examples=[True],
    )
    path: PathText | None = Field(
        default=None,
        description="adapter in the format of PEFT to start from: a folder. It sets all keys above",
        examples=["my-adapter"],
        json_schema_extra=if_absent("new adapters"),
    )
    base_dtype: Literal["stored", "float32", "bfloat16"] = Field(
        default="stored",
        description="dtype of the frozen parameters in device memory. `stored`: that of the checkpoint",
        examples=["bfloat16"],
    )

    @property
    def is_enabled(self) -> bool:
        """Whether adapters are trained."""
        return bool(self.rank or self.path)

    @property
    def new_adapters(self) -> LoraConfig | None:
        """Settings of new adapters. None without adapters, or if the adapters are loaded from `path`."""
        if not self.rank:
            return None
        alpha = self.alpha or float(ALPHA_PER_RANK * self.rank)
        return LoraConfig(
            self.rank,
            alpha,
            targets=self.targets,
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            rank_pattern=self.rank_pattern,
            alpha_pattern=self.alpha_pattern,
            modules_to_save=self.modules_to_save,
            target_parameters=self.target_parameters,
        )


# --- The rotary embedding


class RopeScaling(BaseModel):
    """The keys of `model.rope_scaling` that all types have. The required ones are those that transformers requires."""

    model_config = STRICT

    rope_type: str | None = Field(default=None, examples=["yarn"])
    type: str | None = Field(default=None, examples=["yarn"])
    rope_theta: Factor | None = None
    partial_rotary_factor: Factor | None = None


class LinearScaling(RopeScaling):
    """The keys of the types linear and dynamic."""

    factor: Factor


class Llama3Scaling(LinearScaling):
    """The keys of the type llama3."""

    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positions | None = None


class YarnScaling(LinearScaling):
    """The keys of the type yarn."""

    original_max_position_embeddings: Positions | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None
    truncate: bool = True


class LongRopeScaling(RopeScaling):
    """The keys of the type longrope."""

    short_factor: Factors
    long_factor: Factors
    original_max_position_embeddings: Positions | None = None
    factor: Factor | None = None
    attention_factor: Factor | None = None


SCALINGS: Mapping[str, type[RopeScaling]] = {
    "default": RopeScaling,
    "linear": LinearScaling,
    "dynamic": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}


def check_rope_scaling(scaling: HFConfig) -> None:
    """Raise UsageError if the content of `model.rope_scaling` is invalid for all models."""
    rope_type = str(scaling.get("rope_type", scaling.get("type", "")))
    if rope_type not in SCALINGS:
        what = f"rope type `{rope_type:.{MAX_VALUE_CHARS}}` is not supported"
        if not rope_type:
            what = f"`{SCALING_KEY}` has no `rope_type`"
        hint = NTK_HINT if rope_type == "ntk" else did_you_mean(rope_type, SCALINGS)
        raise usage_error(what, f"supported: {', '.join(SCALINGS)}", hint)
    values = parse_table(SCALINGS[rope_type], scaling, f"`{SCALING_KEY}`")
    for smaller, larger in ORDERED_KEYS:
        low = getattr(values, smaller, None)
        high = getattr(values, larger, None)
        if low is not None and high is not None and low >= high:
            what = f"`{SCALING_KEY}` has {smaller} {low:g} and {larger} {high:g}"
            raise usage_error(what, f"{larger} must be the larger one", OTHER_VALUE_HINT)


def override_rope(config: HFConfig, model: Model) -> HFConfig:
    """Return a config with the rotary embedding of a recipe. Transformers reads the same one from it.

    The original positions of a scaling are written out. If the recipe does not name them, they are
    those that the unchanged config has for this scaling, usually its `max_position_embeddings`.

    Args:
        config: Content of a config.json.
        model: The recipe's `[model]`. Absent keys keep the values of the config.

    Raises:
        UsageError: The family has no rotary embedding or several, or does not support the values.
    """
    keys = [key for key in ROPE_KEYS if getattr(model, key.removeprefix("model.")) is not None]
    if not keys:
        return config
    family = family_of(config)
    before = family.arch_config(config)
    _check_one_rope(before, family.name, keys[0])
    try:
        changed = _write_original_positions(_write_rope(config, model), family.arch_config)
        if model.max_position_embeddings is not None:
            # Old configs may have several of these fields. All get the same value, so that it does not
            # matter which one a reader takes.
            fields = [name for name in POSITION_FIELDS if name in changed] or POSITION_FIELDS[:1]
            changed |= dict.fromkeys(fields, model.max_position_embeddings)
        after = family.arch_config(changed)
    except PrepError as error:
        what = f"`{'`, `'.join(keys)}` cannot be applied to this {family.name} model"
        why = error.what
        if error.what == INVALID_CONFIG:
            why = error.why
        raise usage_error(what, why, OTHER_VALUE_HINT) from error
    is_dynamic = _required_rope(after).rope_type == "dynamic"
    if is_dynamic and after.max_positions > before.max_positions:
        why = f"dynamic scaling begins after these positions: {before.max_positions:,} in the checkpoint"
        what = f"`{POSITIONS_KEY}` is {after.max_positions}"
        raise usage_error(what, why, f"remove `{POSITIONS_KEY}`")
    return changed


def _check_one_rope(arch_config: ArchConfig, family_name: str, key: str) -> None:
    """Raise UsageError if the model has no rotary embedding, or more than one."""
    if arch_config.rope is None:
        what = f"`{key}` cannot be applied to {family_name}"
        raise usage_error(what, "it has no rotary embedding", f"remove `{key}`")
    if arch_config.local_rope is not None:
        why = "it has one rotary embedding for layers with a sliding window and another for the other layers"
        hint = text("edit `config.json` of the model before {}", Command("save-init"))
        raise usage_error(f"`{key}` is not supported for {family_name}", why, hint)


def _write_rope(config: HFConfig, model: Model) -> JsonObject:
    """Return the config with the scaling and theta, in the form of transformers 4 or 5 that it has."""
    if model.rope_scaling is None and model.rope_theta is None:
        return dict(config)
    field = _rope_field(config)
    parameters = _rope_parameters(config) or {"rope_type": "default"}
    outer: JsonObject = {}
    if model.rope_scaling is not None:
        kept = {key: parameters[key] for key in KEPT_KEYS if key in parameters}
        scaling = {key: value for key, value in model.rope_scaling.items() if key != "type"}
        parameters = {**kept, "rope_type": model.rope_scaling.get("type"), **scaling}
        # `read_rope` prefers the field outside of the scaling, so an old value there would win.
        outer = {ORIGINAL: scaling[ORIGINAL]} if ORIGINAL in scaling else {}
    theta = model.rope_theta or (model.rope_scaling or {}).get("rope_theta")
    if theta is not None:
        parameters["rope_theta"] = theta
        outer |= {
            name: theta
            for name in THETA_FIELDS
            if name in config or (name, field) == VERSION_4_THETA
        }
    return {**config, field: parameters, **outer}


def _rope_field(config: HFConfig) -> str:
    """Return the name of the field with the rope scaling."""
    # transformers 4 writes `rope_scaling`, version 5 `rope_parameters`. It reads the first if a config has both.
    if config.get("rope_scaling") or not config.get("rope_parameters"):
        return "rope_scaling"
    return "rope_parameters"


def _rope_parameters(config: HFConfig) -> JsonObject:
    """Return the object of the rope scaling, or an empty one. The config is valid."""
    parameters = config.get(_rope_field(config)) or {}
    assert isinstance(parameters, dict), "checked by `read_rope`"
    return dict(parameters)


def _write_original_positions(config: JsonObject, read_arch: ReadArch) -> JsonObject:
    """Return the config with the original positions of its scaling, at both places where transformers reads them."""
    rope = _required_rope(read_arch(config))
    if ORIGINAL not in SCALINGS[rope.rope_type].model_fields:
        return config
    field = _rope_field(config)
    original = {ORIGINAL: rope.original_max_positions}
    return {**config, **original, field: {**_rope_parameters(config), **original}}


def _required_rope(arch_config: ArchConfig) -> Rope:
    assert arch_config.rope is not None, "checked by _check_one_rope"
    return arch_config.rope
