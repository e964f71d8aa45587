"""GPT-Neo: learned positions, alternating global and local attention, unscaled attention, no bias on QKV."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields, windows_by_layer_type
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import ALWAYS, MAX_LAYERS, HFConfig, read_size
from prepcli.models.rows import (
    attention,
    build_family,
    embedding,
    layer_norm,
    linear,
    matrix,
    stack,
)

FIELD_NAMES = {"layers": "num_layers", "heads": "num_heads", "mlp": "intermediate_size"}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GPTNeoConfig."""
    return _gpt_style.sizes(
        config,
        vocab=50257,
        positions=2048,
        embed=2048,
        layers=24,
        heads=16,
        field_names=FIELD_NAMES,
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, "attention_layers", "attention_types")
    window = read_size(config, "window_size", 256)
    axis_sizes = sizes(config)
    windows = windows_by_layer_type(
        _attention_kinds(config),
        ("global", "local"),
        layers=axis_sizes["layers"],
        window=window,
        field="attention_types",
    )
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes), attn_scale=1.0, sliding_windows=windows
    )


def _attention_kinds(config: HFConfig) -> Any:
    """Return the attention type of each layer. `attention_layers` overrides `attention_types`, as in transformers.

    Return a malformed pattern as it is.
    """
    # The default of GPTNeoConfig: 2 kinds, 12 times, are its 24 layers.
    pattern = config.get("attention_types") or [[["global", "local"], 12]]
    with contextlib.suppress(TypeError, ValueError):
        # The number of repeats may be huge in a broken config: build one layer too many at most.
        layer_kinds = islice(_repeat_kinds(pattern), MAX_LAYERS + 1)
        return config.get("attention_layers") or list(layer_kinds)
    return pattern


def _repeat_kinds(pattern: Any) -> Iterator[Any]:
    """Yield the kinds of a pattern, e.g. [[["global", "local"], 2]] -> global, local, global, local."""
    for kinds, repeats in pattern:
        if kinds:
            for _ in range(repeats):
                yield from kinds


PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **embedding("positions", "positions embed <- wpe.weight: positions embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **attention("attn.attention.{}_proj", out_name="out", out_bias=ALWAYS),
        **layer_norm("mlp_norm", "embed <- ln_2.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
LEGACY_BUFFERS = _gpt_style.mask_buffers("h.{i}.attn.attention")
LAYOUTS = hf_flax_layout(PARAMETERS, prefix="transformer.", allows_tied_head=True)
FAMILY = build_family(
    name="gpt_neo",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped=LEGACY_BUFFERS,
    layouts=LAYOUTS,
    dropout_fields=DropoutFields(residual=("resid_dropout", 0.0), embedding=("embed_dropout", 0.0)),
)
