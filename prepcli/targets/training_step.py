"""The plan of a saved training step: a training state in memory, written to an Orbax item in the layout of an init."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core.json_values import HFConfig
from prepcli.engine.checkpoint_store import LeafSpec
from prepcli.models.chunk_shapes import MIN_SPLIT_NBYTES
from prepcli.models.manifest_family import manifest_family
from prepcli.models.mesh import parse_mesh
from prepcli.models.rule_text import merge_rules
from prepcli.planning import coverage
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.item_storage import OCDBT_ZARR3, recorded_storage
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.tensors import PARAMS
from prepcli.sources.foreign_trees import tensors_from_manifest
from prepcli.sources.source import Source
from prepcli.sources.tensor_match import TensorNames
from prepcli.targets.orbax_item import OrbaxLayout, Partitioning
from prepcli.targets.planner import make_plan, start_draft, with_source_state

# Keys of config.json in different versions of transformers.
DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class StartModel:
    """The start model of a run without an Orbax checkpoint of prep, e.g. a Hugging Face folder.

    Attributes:
        manifest: Manifest for the model, as `prep save-init` would write it.
        small_files: Tokenizer and other files to copy to each step.
    """

    manifest: Manifest
    small_files: tuple[SmallFile, ...]


def plan_training_step(
    leaves: Mapping[str, LeafSpec],
    start_manifest: Manifest,
    *,
    request: str,
    slab_nbytes: int,
    min_split_nbytes: int = MIN_SPLIT_NBYTES,
) -> Plan:
    """Plan a save of leaves. File n of the plan's streams is leaf n, in C order.

    Raises:
        PrepError: The leaves differ from the start checkpoint's model.
    """
    source = _source_of_leaves(leaves, start_manifest)
    mesh = parse_mesh(start_manifest.mesh) if start_manifest.mesh else None
    layout = OrbaxLayout(
        Partitioning(mesh, merge_rules(start_manifest.rules), min_split_nbytes),
        scan=start_manifest.scan,
        scan_axis=start_manifest.scan_axis,
        is_training_step=True,
    )
    # The state has the padded vocabulary of the start already, so no row is filled.
    draft = with_source_state(start_draft(source, layout.axis_maps(source)))
    name = str(start_manifest.name)
    plan = make_plan(draft, layout.place(draft), command="train", request=request, name=name)
    # A run that starts from a step of another run names the first model, and not that step.
    if start_manifest.kind == "train":
        name = start_manifest.source_name
    plan = replace(
        plan,
        source_name=name,
        small_files=(),
        dropped=(),
        checks=(),
        settings=_item_settings(source, start_manifest),
    )
    # Proves, without reading a tensor, that each byte of the state is written to exactly one place.
    coverage.check(plan, slab_nbytes)
    return plan


def _item_settings(source: Source, start_manifest: Manifest) -> Manifest:
    """Return the settings of the start checkpoint in the manifest of a step."""
    settings = Manifest(
        name=start_manifest.name,
        family=start_manifest.family,
        vocab=start_manifest.vocab,
        layout=start_manifest.layout,
        mesh=start_manifest.mesh,
        rules=start_manifest.rules,
        scan=start_manifest.scan,
        scan_axis=start_manifest.scan_axis,
        prefixed=source.names.is_prefixed,
        tied=start_manifest.tied,
    )
    if start_manifest.is_adapter:
        settings |= Manifest(lora=start_manifest.lora)
    elif start_manifest.towers is not None:
        settings |= Manifest(towers=start_manifest.towers)
    settings |= start_manifest.earlier_drops
    if start_manifest.get("origin"):
        settings |= Manifest(origin=start_manifest["origin"])
    if recorded_storage(start_manifest.storage) == OCDBT_ZARR3:
        settings |= Manifest(storage=OCDBT_ZARR3.name)
    return settings | Manifest(kind="train", config=source.config)


def _source_of_leaves(leaves: Mapping[str, LeafSpec], start_manifest: Manifest) -> Source:
    """Return the leaves as a source. File n of the source is leaf n."""
    config = _config_of_leaves(leaves, start_manifest.config)
    # Names of adapters always have a prefix: PEFT's.
    is_prefixed = start_manifest.prefixed or start_manifest.is_adapter
    names = TensorNames(manifest_family(start_manifest | Manifest(config=config)), is_prefixed)
    stored_leaves: dict[str, Array] = {}
    for number, (name, leaf) in enumerate(leaves.items()):
        stored_leaves[name] = whole_array(name, leaf.dtype, leaf.shape, (number, 0))
    # Training has changed the values: the digests that the start's manifest records no longer apply.
    manifest = start_manifest | Manifest(config=config, tensors={}, slots={}, others={})
    tensors, state = tensors_from_manifest(stored_leaves, names, manifest, "the training state")
    return Source(
        str(start_manifest.name),
        Path(),
        names.family,
        config,
        names,
        tensors,
        (),
        (),
        (),
        None,
        state_tensors=state,
    )


def _config_of_leaves(leaves: Mapping[str, LeafSpec], config: HFConfig) -> HFConfig:
    """Return the config with the parameters' dtype in its dtype keys."""
    dtypes = {leaf.dtype for name, leaf in leaves.items() if name.startswith(f"{PARAMS}.")}
    changed_config = dict(config)
    # config.json has room for one dtype. With several, the dtype of the start stays.
    if len(dtypes) == 1:
        (dtype,) = dtypes
        for key in DTYPE_KEYS:
            if key in config:
                changed_config[key] = dtype
    return changed_config
