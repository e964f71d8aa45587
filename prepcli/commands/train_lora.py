"""The adapters of a run with LoRA: where they start, and the digest of the parameters that they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.train_start import StartCheckpoint, damage_hint
from prepcli.errors import PrepError, usage_error
from prepcli.execution.run_place import RunPlace
from prepcli.formats.manifest import BASE_KEY, LORA_KEY, SAMPLE_DIGEST_KEY
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.openers.peft_folder import open_adapter
from prepcli.sources.openers.peft_settings import read_lora_config
from trainer.models.lora import lora_family, lora_from_manifest
from trainer.models.registry import family_of
from trainer.recipe.lora_table import Lora

if TYPE_CHECKING:
    from trainer.nn.model_spec import ModelSpec
    from trainer.training.step import TrainState

FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def with_adapters(
    start: StartCheckpoint, table: Lora, place: RunPlace, *, last_step: int, verify: bool
) -> StartCheckpoint:
    """Return a start checkpoint with the trained adapters of a run.

    Args:
        start: Checkpoint of the frozen parameters.
        table: The recipe's `[lora]`.
        place: Place of the run.
        last_step: Step of the run to resume from; 0 for none.
        verify: Check the bytes of the adapters against recorded checksums.

    Raises:
        PrepError: The adapters do not fit the model, or the start checkpoint has adapters only.
    """
    if LORA_KEY in start.manifest:
        why = "the step of a run with LoRA has only adapters"
        raise usage_error("`model.path` is not a complete model", why, "`prep merge` adds them to their base")
    config = start.manifest["config"]
    if last_step:
        reader = place.open_step(last_step, verify, damage_hint(place, last_step))
        lora = lora_from_manifest(reader.manifest)
        if lora is None:
            hint = "`--restart` starts again from step 0; another `name` keeps both runs"
            raise PrepError(f"{place.name} began without adapters", "its steps have all parameters", hint)
        return dataclasses.replace(
            start, resume_step=int(reader.manifest["step"]), lora=dataclasses.asdict(lora), adapters=reader
        )
    if table.path is None:
        assert table.new_adapters is not None
        return dataclasses.replace(start, lora=dataclasses.asdict(table.new_adapters))
    family, adapter = family_of(config), Path(table.path).expanduser()
    lora = read_lora_config(adapter, family, config)
    reader = WeightsReader(open_adapter(adapter, lora_family(family, config, lora), config), verify=verify)
    return dataclasses.replace(start, lora=dataclasses.asdict(lora), adapters=reader)


def frozen_dtypes(start: StartCheckpoint, model: ModelSpec, base_dtype: str) -> dict[str, str]:
    """Return the dtype of each frozen parameter in device memory, by path."""
    if base_dtype != "stored":
        return dict.fromkeys(model.frozen_paths, base_dtype)
    stored = {path: start.reader.leaves[f"params.{path}"].dtype for path in model.frozen_paths}
    return {path: dtype if dtype in FLOAT_DTYPES else "float32" for path, dtype in stored.items()}


def base_facts(state: TrainState, model: ModelSpec, start: StartCheckpoint, *, name: str) -> dict[str, Any]:
    """Return the manifest's entry for the frozen parameters.

    Args:
        state: State of the run, with the frozen parameters in the device memory.
        model: The model.
        start: Open checkpoint of the frozen parameters.
        name: Name of the checkpoint.

    Returns:
        The name, the digest of all frozen parameters on the devices, with which a run resumes, and the `sample_digest`
        of the checkpoint, with which `prep merge` recognizes it.
    """
    from trainer.models.param_tree import flatten_tree
    from trainer.training.base_digest import frozen_digest

    leaves = flatten_tree(state["params"])
    digest = frozen_digest({path: leaves[path] for path in model.frozen_paths})
    return {BASE_KEY: {"name": name, "digest": digest, SAMPLE_DIGEST_KEY: start.sample_digest()}}


def check_base(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise PrepError if a run resumes on other frozen parameters than its adapters were trained with."""
    before, now = manifest.get(BASE_KEY, {}), facts[BASE_KEY]
    if before.get("digest") == now["digest"]:
        return
    what = f"{now['name']} differs from the checkpoint that the run began with"
    why = f"its parameters have the digest {now['digest']}, those of {before.get('name')} had {before.get('digest')}"
    raise PrepError(what, why, "`model.path` of the checkpoint that the run began with")
