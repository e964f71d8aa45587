"""Layout of an item for another trainer (MaxText, Tunix, Levanter), with the trainer's leaf names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prepcli.formats.manifest import EXPORTED_STEP
from prepcli.formats.orbax import LEVANTER_MODEL_ROOT, STATE_ITEMS
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.item_storage import ItemStorage
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.layout_leaves import find_layout_leaves
from prepcli.targets.orbax_item import LeafUse, OrbaxItemLayout, Partitioning, lay_out_uses


@dataclass(frozen=True, slots=True)
class TrainerItem:
    """Place of the parameters in the checkpoints of a trainer.

    Attributes:
        item: Name of the item in a step, or "" if the output itself is the item.
        state_item: Name of the item with the optimizer state, or "" if it is in the item of the parameters.
        root: Prefix of the dotted names of leaves.
        suffix: End of these names.
    """

    item: str
    state_item: str = ""
    root: str = ""
    suffix: str = ""

    def folder(self, step: int = EXPORTED_STEP) -> str:
        """Return the folder of the item in an output, or "" for the output itself."""
        if not self.item:
            return ""
        return f"{step}/{self.item}"

    def state_folder(self, step: int) -> str:
        """Return the folder of the item with a training state: the folder of the step if it has two items."""
        if not self.state_item:
            return self.folder(step)
        return str(step)


# The train state of MaxText 0.2.5 has the Flax variables, with the collection `params`, under the key `params`.
MAXTEXT_ITEM = TrainerItem("items", root="params.params.")
# Tunix 0.1.7 (sft/checkpoint_manager.py) saves `nnx.State`. Each of its leaves is a variable with the key `value`.
TUNIX_ITEM = TrainerItem("model_params", state_item=STATE_ITEMS["model_params"], suffix=".value")
# A training state of Levanter has the model in its field `model`.
LEVANTER_ITEM = TrainerItem("", root=LEVANTER_MODEL_ROOT)
TRAINER_ITEMS = {
    "maxtext": MAXTEXT_ITEM,
    "maxtext-unscanned": MAXTEXT_ITEM,
    "tunix": TUNIX_ITEM,
    "levanter": LEVANTER_ITEM,
    "levanter-unscanned": LEVANTER_ITEM,
}


def lay_out_trainer_item(
    source: Source,
    tensors: Sequence[SourceTensor],
    *,
    layout: str,
    vocab_size: int,
    storage: ItemStorage,
) -> OrbaxItemLayout:
    """Lay out the tensors of a source as the leaves of a trainer's item, in chunks of bounded size.

    Args:
        source: The opened source.
        tensors: The tensors to write, with the dtypes of the output.
        layout: Name of the layout.
        vocab_size: Vocabulary rows in the output.
        storage: Storage of the chunks.

    Raises:
        PrepError: A tensor has no leaf in the layout, or a leaf has no tensor.
    """
    uses = list(trainer_item_uses(source, tensors, layout=layout, vocab_size=vocab_size))
    # No rule applies without a mesh.
    return lay_out_uses(source, uses, Partitioning(mesh=None, rules=DEFAULT_RULES), storage=storage)


def trainer_item_uses(
    source: Source, tensors: Sequence[SourceTensor], *, layout: str, vocab_size: int
) -> Iterator[LeafUse]:
    """Yield each tensor with its leaf. The arguments are as for `lay_out_trainer_item`."""
    by_name = {tensor.name: tensor for tensor in tensors}
    place = TRAINER_ITEMS[layout]
    for name, leaves in find_layout_leaves(source, layout, by_name, vocab_size=vocab_size).items():
        for path, axis_map, indices in leaves:
            leaf = f"{place.root}{path}{place.suffix}"
            yield LeafUse(by_name[name], leaf, axis_map, indices, path)
