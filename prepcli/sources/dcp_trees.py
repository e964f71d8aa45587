"""State dicts in torch distributed checkpoints under other names than those of Hugging Face, e.g. of torchtitan."""

from __future__ import annotations

from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_dcp import DcpFolder
from prepcli.models.parameters import Family
from prepcli.planning.libraries import Library
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.foreign_trees import ForeignTree, match_foreign_tree


def match_dcp_tree(
    folder: DcpFolder,
    family: Family,
    config: HFConfig,
    display_name: str,
    manifest: Manifest = NO_MANIFEST,
    *,
    library: Library,
) -> ForeignTree:
    """Match the tensors of a checkpoint with the state dict of a library.

    Args:
        folder: The checkpoint.
        family: Model family.
        config: The model's config.json.
        display_name: Name of the checkpoint in messages.
        manifest: Manifest of a checkpoint written by prep.
        library: Entry of the library, with one layout.

    Raises:
        PrepError: The family has no such layout, or a tensor has the wrong shape.
    """
    (layout,) = library.layouts
    if layout not in family.layouts:
        why = f"its tensors have the names of {layout}, and prep has no layout of it for {family.name}"
        hint = f"save it with the names of Hugging Face, {library.hub_names_hint}"
        raise PrepError(f"{display_name} is not supported", why, hint)
    leaves = {tensor.name: tensor for tensor in folder.tensors}
    return match_foreign_tree(
        leaves,
        family,
        config,
        display_name,
        roots=("",),
        layout=layout,
        manifest=manifest,
    )
