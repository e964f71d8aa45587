"""The leaves of a checkpoint with their logical dims, by which a mesh splits them.

They are those of an Orbax checkpoint, or those that `save-init` makes of a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prepcli.console.lists import join_names
from prepcli.errors import PrepError, usage_error
from prepcli.inspection.contents import CheckpointContents, TensorEntry
from prepcli.planning.accounting import detect_names
from prepcli.planning.state_names import PARAMS
from trainer.models.axis_map import AxisMap, bind_row
from trainer.models.parameters import parameter_rows
from trainer.models.registry import family_of
from trainer.models.suggest import suggest

MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class LogicalLeaf:
    """A leaf; `dims` are the atoms of each of its dims, of which the first is the dim's name."""

    name: str
    dims: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    dtype: str


def logical_leaves(contents: CheckpointContents) -> dict[str, LogicalLeaf]:
    """Name -> leaf. PrepError where the family is not known, or a shape is not what the config makes it."""
    if contents.kind == "orbax" and not contents.manifest:
        why = "it has no manifest, so nothing says what the dims of its leaves are"
        raise PrepError(f"{contents.display_name} was not written by prep", why)
    return {leaf.name: leaf for leaf in _leaves(contents)}


def _leaves(contents: CheckpointContents) -> Iterator[LogicalLeaf]:
    family, config = family_of(contents.config), contents.config
    is_item = contents.kind == "orbax"
    layout = contents.manifest if is_item else {}
    names = detect_names(family, config, [entry.name for entry in contents.entries])
    entries = {entry.name if is_item else names.bare_name(entry.name): entry for entry in contents.entries}
    sizes, tied = family.sizes(config), layout["tied"] if is_item else family.is_tied(config, entries)
    for path, row in parameter_rows(
        family, config, layout.get("scan", True), layout.get("scan_axis", 0), entries
    ).items():
        bound = bind_row(row, sizes)
        dims = tuple(tuple(factor.atom for factor in dim) for dim in bound.leaf_dims)
        for tensor, at in bound.tensors() if path != family.tying.head_leaf or not tied else ():
            leaf = f"{PARAMS}.{path.format(**at)}"
            entry = entries.get(leaf if is_item else tensor)
            if entry is not None:
                _check(contents, entry, bound, is_item)
                yield LogicalLeaf(leaf, dims, bound.leaf_shape, entry.dtype)


def _check(contents: CheckpointContents, entry: TensorEntry, bound: AxisMap, is_item: bool) -> None:
    expected = bound.leaf_shape if is_item else bound.source_shape
    if entry.shape != expected:
        why = f"shape {list(entry.shape)}, its config makes it {list(expected)}"
        raise PrepError(f"{contents.display_name}: {entry.name} is not what it should be", why)


def find_leaf(leaves: Mapping[str, LogicalLeaf], pattern: str, display_name: str) -> LogicalLeaf:
    """The leaf that is called so, by its name, by some parts of it, or by a pattern that only it matches. A usage
    PrepError lists several, or guesses which was meant."""
    found = [name for name in leaves if name in (pattern, f"{PARAMS}.{pattern}")]
    found = found or [name for name in leaves if f".{pattern}." in f".{name}." or fnmatchcase(name, pattern)]
    if len(found) > 1:
        hint = f"one of them: `--shards {found[0]}`"
        raise usage_error(
            f"`{pattern}` matches {len(found)} leaves of {display_name}", join_names(found, max_names=MAX_LISTED), hint
        )
    if not found:
        meant = suggest(pattern, [name.removeprefix(f"{PARAMS}.") for name in leaves])
        hint = f"did you mean `{meant}`?" if meant else ""
        raise usage_error(
            f"{display_name} has no leaf `{pattern}`",
            f"it has {join_names(leaves, len(leaves), max_names=MAX_LISTED)}",
            hint,
        )
    return leaves[found[0]]
