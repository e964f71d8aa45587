"""Write parameters in memory as an Orbax checkpoint, with the settings of another checkpoint of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.console.ui import Ui
from prepcli.engine.budget import make_budget
from prepcli.errors import OutputExistsError, PrepError
from prepcli.execution.step_writer import MEMORY_NBYTES, StepWriter
from prepcli.operations.conversion import CommonOptions, open_checkpoint
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.state_names import PARAMS
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.source import HF_FOLDER, Source
from prepcli.targets.hf_folder import copied_small_files, settings_files
from prepcli.targets.training_step import plan_training_step
from prepcli.training_runs.start import start_manifest
from trainer.models.checkpoint_store import HostLeaf, LeafSpec
from trainer.models.param_tree import param_leaves

COMMAND = "save-params"


@dataclass(frozen=True, slots=True)
class SaveParamsRequest:
    """Request to write parameters; `common.checkpoint` is a checkpoint of the same model, `common.out` the output."""

    common: CommonOptions
    leaves: Mapping[str, HostLeaf]  # by dotted name, such as `params.embed.tokens`


def save_params(request: SaveParamsRequest, ui: Ui) -> Path:
    """Write parameters in memory as an Orbax checkpoint.

    Args:
        request: Parameters, output, and a checkpoint of the same model.
        ui: Receives notes, warnings and progress.

    Returns:
        The output.

    Raises:
        OutputExistsError: The output exists.
        PrepError: The parameters do not fit the checkpoint, or the output cannot be written.
    """
    out = request.common.out
    assert out is not None
    if os.path.lexists(out):
        raise OutputExistsError(
            f"{out} already exists", "parameters do not replace it", "choose another `--out`"
        )
    located, source = open_checkpoint(request.common, ui)
    shapes = {
        name: LeafSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in request.leaves.items()
    }
    plan = _plan(shapes, source, located.model_name)
    StepWriter(plan, out, request.leaves).write()
    return out


def _plan(shapes: Mapping[str, LeafSpec], source: Source, name: str) -> Plan:
    """Return the plan of an Orbax checkpoint of leaves, i.e. of a training step without a state."""
    tokens = shapes.get(f"{PARAMS}.embed.tokens")
    if tokens is None:
        raise _mismatch_error(source, "the tree has no embed.tokens")
    manifest = _manifest(source, name, vocab_rows=(*tokens.shape, 1)[0])
    _check_leaves(shapes, source, manifest)
    request = f"prep.save_params(like={source.display_name!r})"
    plan = plan_training_step(
        shapes, manifest, request=request, slab_nbytes=make_budget(MEMORY_NBYTES).slab_nbytes
    )
    return replace(
        plan,
        command=COMMAND,
        item="",
        settings={**plan.settings, "kind": "init"},
        small_files=_small_files(source, plan.settings["config"]),
    )


def _manifest(source: Source, name: str, *, vocab_rows: int) -> dict[str, Any]:
    """Return the manifest of the model with a vocabulary of this many rows, for chunks of bounded size."""
    with WeightsReader(source, vocab_rows, verify=False) as reader:
        return start_manifest(source, reader, name) | {
            "mesh": None,
            "rules": [*reader.manifest["rules"]],
        }


def _check_leaves(
    shapes: Mapping[str, LeafSpec], source: Source, manifest: Mapping[str, Any]
) -> None:
    """Raise PrepError unless the leaves have the paths and shapes of the model's parameters."""
    expected = {
        f"{PARAMS}.{path}": leaf.shape
        for path, leaf in param_leaves(source.family, manifest["config"], manifest["tied"]).items()
    }
    for name in sorted(expected.keys() | shapes.keys()):
        path = name.removeprefix(f"{PARAMS}.")
        if name not in shapes:
            raise _mismatch_error(source, f"the tree has no {path}")
        if name not in expected:
            raise _mismatch_error(source, f"the model has no {path}")
        if shapes[name].shape != expected[name]:
            raise _mismatch_error(
                source, f"{path} has shape {shapes[name].shape}, not {expected[name]}"
            )


def _mismatch_error(source: Source, why: str) -> PrepError:
    return PrepError(f"the parameters are not those of {source.display_name}", why)


def _small_files(source: Source, config: Mapping[str, Any]) -> tuple[SmallFile, ...]:
    prefix = f"{HF_FOLDER}/"
    extra_files = copied_small_files(source, prefix)
    return settings_files(config, (), extra_files=extra_files, path_prefix=prefix)
