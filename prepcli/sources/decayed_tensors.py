"""Parameters with another weight decay in a recipe than in the parameter groups of torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prepcli.models.decayed_leaves import DecayRule
from prepcli.models.param_tree import param_leaves
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.sources.source import Source, match_source_tensors, stored_axis_maps

# Rule of a recipe without keys for it.
DEFAULT_RULE = DecayRule()


def decay_differences(
    source: Source, decayed_names: Collection[str], rule: DecayRule = DEFAULT_RULE
) -> Iterator[str]:
    """Yield a description of the parameters with weight decay on one side only, if there are any.

    Args:
        source: The opened source.
        decayed_names: Names in files of the parameters with weight decay in torch.
        rule: The rule of the recipe.
    """
    differing = sorted(_decayed_in_prep(source, rule) ^ {*decayed_names})
    if differing:
        yield f"weight decay of {len(differing):,} parameters, e.g. {differing[0]}"


def _decayed_in_prep(source: Source, rule: DecayRule) -> set[str]:
    """Return the names in files of the parameters with weight decay in prep."""
    match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
    manifest = source.tree_manifest
    leaves = param_leaves(
        source.family,
        source.config,
        match.is_tied,
        scan=manifest.scan,
        scan_axis=manifest.scan_axis,
    )
    names: set[str] = set()
    for tensor in source.tensors:
        for use in match.uses.get(tensor.name, ()):
            if rule.decays(leaves[use.path]):
                names.add(source.file_name(tensor))
    return names
