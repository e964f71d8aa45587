"""The recipe tables `[model]` and `[lora]`: the model to start from, how it is computed, and its adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from prepcli.models.activation_memory import Offload, PolicyName
from prepcli.models.lora_config import DEFAULT_TARGETS, LoraConfig
from trainer.recipe.key_types import (
    STRICT,
    ActivationNames,
    DropoutRates,
    NonNegativeInt,
    OptionalChunkSize,
    PathText,
    PositiveFloat,
    PositiveInt,
    RatioRange,
    RuleTexts,
    UnitInterval,
    if_absent,
)
from trainer.recipe.rope_overrides import RopeOverrides

# Default of `alpha`.
# The scale alpha / rank is then 2 for every rank.
ALPHA_PER_RANK = 2


class Model(BaseModel):
    """The model to start from, and how it is computed."""

    model_config = STRICT

    path: PathText | None = Field(
        default=None,
        description="a checkpoint of any format: a path, a hub id, or a URL",
        examples=["gpt-neo-1.3B-init"],
        json_schema_extra=if_absent('no checkpoint, with `init = "random"`'),
    )
    lock: PathText | None = Field(
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
    scan_layers: bool = Field(
        default=True,
        description="compile one layer and loop over it. `false`: unroll all layers",
        examples=[True],
    )
    remat_policy: PolicyName | ActivationNames = Field(
        default="none",
        description="activations that a layer saves for its backward pass besides its input: a name of "
        "`jax.checkpoint_policies`, or a list of activations. `none`: all but those of norms and activation functions",
        examples=["nothing_saveable"],
    )
    offload: Offload = Field(
        default="none",
        description="`residuals`: save the inputs of layers in pinned host memory instead of device memory",
        examples=["residuals"],
    )
    head_chunk_size: OptionalChunkSize = Field(
        default=None,
        description="tokens of a device per row whose logits and loss are computed at a time. `-1`: all",
        examples=[512],
    )
    ffn_chunk_size: PositiveInt | Literal[-1] = Field(
        default=-1,
        description="tokens of a device per row whose projections and MLP are computed at a time. `-1`: all",
        examples=[2048],
    )
    attention_kernel: Literal["auto", "reference", "blockwise", "cudnn", "pallas-splash"] = Field(
        default="auto",
        description="`auto`: the best kernel for the devices, the model and the length. `reference`: the scores of "
        "all queries and keys at once. `blockwise`: tile by tile, with memory linear in the length. `cudnn`: flash "
        "attention of cuDNN. `pallas-splash`: splash attention on TPUs",
        examples=["blockwise"],
    )
    q_chunk_size: OptionalChunkSize = Field(
        default=None,
        description="queries of a tile of blockwise attention. `-1`: all",
        examples=[1024],
    )
    k_chunk_size: OptionalChunkSize = Field(
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

    @property
    def rope_overrides(self) -> RopeOverrides:
        """The keys that change the rotary embedding of the checkpoint."""
        return RopeOverrides(
            self.rope_scaling, theta=self.rope_theta, max_positions=self.max_position_embeddings
        )


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
