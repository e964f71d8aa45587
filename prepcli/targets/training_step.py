"""The plan of a save: a training state in memory into an Orbax item, as an init is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prepcli.formats.manifest import STATE
from prepcli.planning import coverage
from prepcli.planning.accounting import KEEP_ALL, Names
from prepcli.planning.grids import Lattice, Places
from prepcli.planning.placing import Want
from prepcli.planning.plan import Fill, Plan
from prepcli.planning.slabs import all_slabs
from prepcli.planning.slots import PARAMS
from prepcli.sources.source import Source, counted, table_of
from prepcli.sources.tree_tensors import HeldLeaf, tree_tensors
from prepcli.targets.orbax_item import Split, item_streams, make_item
from prepcli.targets.streams import Cut, vocab_names
from trainer.models.checkpoint_store import Stored
from trainer.models.mesh import parse, with_rules
from trainer.models.registry import family_of

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, by the age of transformers
KEPT = ("name", "family", "vocab", "layout", "mesh", "rules", "scan", "scan_axis", "prefixed", "tied")


def state_plan(leaves: Mapping[str, Stored], before: Mapping[str, Any], request: str, slab_nbytes: int) -> Plan:
    """How leaves, by dotted name, are saved: file n of the plan's streams is leaf n, in C order.

    `before` is the manifest of the checkpoint that they began as. PrepError where they do not make a model like it.
    """
    source = _source(leaves, before)
    table = table_of(source, before["scan"], before["scan_axis"])
    found, vocabulary = counted(source, table, KEEP_ALL), source.vocabulary()
    split = Split(parse(before["mesh"]) if before["mesh"] else None, with_rules(before["rules"]))
    item = make_item(source, found, table, vocabulary.stored, split)
    cut = Cut(vocabulary, vocab_names(source, found), Fill("zeros"))
    plan = Plan(
        command="train",
        request=request,
        source_name=before["source"]["name"] if before["kind"] == "train" else before["name"],
        sources=(),
        streams=item_streams(source, found, item, vocabulary.stored, cut),
        files=item.files,
        leaves=item.leaves,
        settings={**{key: before.get(key) for key in KEPT}, "kind": "train", "config": source.config},
        names=source.shown_names(),
        item=STATE,
    )
    coverage.check(plan, lambda: all_slabs(plan.streams, slab_nbytes))
    return plan


def _source(leaves: Mapping[str, Stored], before: Mapping[str, Any]) -> Source:
    """The leaves as a checkpoint whose files they are."""
    config = _config(leaves, before["config"])
    names = Names(family_of(config), before["prefixed"])
    held = {
        name: HeldLeaf(leaf.shape, leaf.dtype, tuple(max(1, n) for n in leaf.shape), partial(_all_of, number))
        for number, (name, leaf) in enumerate(leaves.items())
    }
    layout = {**before, "config": config, "tensors": {}, "slots": {}, "others": {}}
    tensors, state = tree_tensors(held, names, layout, "the state to be saved")
    return Source(before["name"], Path(), names.family, config, names, tensors, (), (), (), None, state=state)


def _all_of(number: int, want: Want) -> Places:
    """A leaf in memory is one chunk."""
    nowhere = (0,) * len(want.grid.shape)
    return Lattice(number, 0, nowhere, nowhere)


def _config(leaves: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, with the dtype that the parameters have now where it names one."""
    dtypes = {leaf.dtype for name, leaf in leaves.items() if name.startswith(f"{PARAMS}.")}
    changed = {key: dtypes.copy().pop() for key in DTYPE_KEYS if key in config and len(dtypes) == 1}
    return {**config, **changed}
