"""The recipe table `[model]`: the model to start from, and how it is computed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from prepcli.models.remat import Offload, PolicyName
from trainer.recipe.key_types import (
    STRICT,
    ActivationNames,
    DropoutRates,
    OptionalChunkSize,
    PathText,
    PositiveFloat,
    PositiveInt,
    RatioRange,
    if_absent,
)
from trainer.recipe.rope_overrides import RopeOverrides


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
