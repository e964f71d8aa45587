"""Read the training state of a source, with the optimizer of its run's recipe."""

from __future__ import annotations

import tomllib
from dataclasses import replace

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.decayed_leaves import DecayRule
from prepcli.sources.adam_state import AdamSettings, AdamState, read_adam_state
from prepcli.sources.source import Source


def read_training_state(source: Source) -> AdamState:
    """Return the training state of a source. Only the counters are read.

    A step of a run has the settings of its optimizer in the recipe of its manifest.

    Args:
        source: The opened source.

    Raises:
        PrepError: The source has no state of AdamW, or moments of some parameters are missing.
        DamagedError: The recipe in the manifest is broken.
    """
    state = read_adam_state(source)
    manifest = source.manifest or NO_MANIFEST
    schedule = manifest.rate
    if "recipe" not in manifest or schedule is None:
        return state
    # The tables of a recipe take 0.3 s to import. Every export imports this module.
    from trainer.recipe.lr_schedule import rate_at_step
    from trainer.recipe.optimizer_tables import AdamWTable

    try:
        table = AdamWTable.model_validate(tomllib.loads(manifest.recipe)["optimizer"])
    except (KeyError, ValueError) as error:
        what = f"the recipe in the manifest of {source.display_name} is broken"
        raise DamagedError(what, f"its table `optimizer`: {error}"[:200], GET_AGAIN_HINT) from error
    settings = state.settings
    if settings is None:
        settings = AdamSettings(
            lr=rate_at_step(schedule, state.step),
            peak_lr=float(schedule["peak"]),
            b1=table.b1,
            b2=table.b2,
            eps=table.eps,
            weight_decay=table.weight_decay,
        )
    decay_rule = DecayRule(
        table.decay_embeddings, exclude=table.decay_exclude, include=table.decay_include
    )
    return replace(state, settings=settings, clip_norm=table.clip_norm, decay_rule=decay_rule)
