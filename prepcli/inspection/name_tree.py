"""Tensor names as a tree, with sizes summed by branch and equal layers merged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prepcli.core.formatting import format_bytes, number_runs
from prepcli.inspection.contents import name_path
from prepcli.sources.source import SourceTensor

# Without leading zeros: `int` and `str` must give the label back. 9 digits bound the conversion.
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
MAX_RUNS = 4  # runs of numbers that are listed
# A tensor whose name is also a prefix of other names.
SELF_LABEL = "(itself)"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A branch, or a leaf for `tensors` tensors of one shape and dtype.

    Attributes:
        labels: Parts of the name. Branches with a single child are joined, e.g. `layers`,
            `{0..31}`.
        tensors: Number of tensors in the node.
        nbytes: Bytes of all tensors in the node.
        dtype: Dtype of a leaf, empty for a branch.
        shape: Shape of each tensor of a leaf.
        children: Nodes of a branch.
    """

    labels: tuple[str, ...]
    tensors: int
    nbytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    children: tuple[TreeNode, ...] = ()

    @property
    def name(self) -> str:
        """The labels, joined by dots."""
        return ".".join(self.labels)


@dataclass(slots=True)
class _TreeBuilder:
    entry: SourceTensor | None = None
    children: dict[str, _TreeBuilder] = field(default_factory=dict)


def build_tree(entries: Iterable[SourceTensor]) -> tuple[TreeNode, ...]:
    """Build the tree of the entries, in their order."""
    root = _TreeBuilder()
    for entry in entries:
        builder = root
        for part in name_path(entry):
            builder = builder.children.setdefault(part, _TreeBuilder())
        builder.entry = entry
    tree = _to_node(root)
    if tree.labels:
        return (tree,)
    return tree.children


def tree_rows(nodes: Sequence[TreeNode], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, shape, dtype, size) of each node, with names indented by depth."""
    for node in nodes:
        times = f"{node.tensors} x " if node.tensors > 1 else ""
        shape = f"{times}{list(node.shape)}" if node.dtype else ""
        yield f"{'  ' * depth}{node.name}", shape, node.dtype, format_bytes(node.nbytes)
        yield from tree_rows(node.children, depth + 1)


def count_nodes(nodes: Sequence[TreeNode]) -> int:
    """Return the number of rows that `tree_rows` yields."""
    return sum(1 + count_nodes(node.children) for node in nodes)


def tree_fields(node: TreeNode) -> dict[str, object]:
    """Return a node for JSON: a leaf has shape and dtype, a branch has children."""
    common: dict[str, object] = {"name": node.name, "tensors": node.tensors, "bytes": node.nbytes}
    if node.dtype:
        return common | {"shape": node.shape, "dtype": node.dtype}
    return common | {"children": [tree_fields(child) for child in node.children]}


def _to_node(builder: _TreeBuilder) -> TreeNode:
    """Convert a builder to a node. Its parent adds its label. A branch with a single child is replaced by the child."""
    # The depth of the recursion is at most MAX_PATH_PARTS of `contents`.
    frozen = {label: _to_node(child) for label, child in builder.children.items()}
    children = tuple(_merge_numbered(frozen))
    entry = builder.entry
    if entry is None:
        if len(children) == 1:
            return children[0]
        return _make_branch(children)
    leaf = TreeNode((), 1, entry.nbytes, entry.dtype, entry.shape)
    if children:
        return _make_branch((replace(leaf, labels=(SELF_LABEL,)), *children))
    return leaf


def _make_branch(children: tuple[TreeNode, ...]) -> TreeNode:
    tensors = 0
    nbytes = 0
    for child in children:
        tensors += child.tensors
        nbytes += child.nbytes
    return TreeNode((), tensors, nbytes, children=children)


def _merge_numbered(children: Mapping[str, TreeNode]) -> Iterator[TreeNode]:
    """Yield the children with their labels. Numbered children with equal content are merged into one.

    For example the equal layers `0`, `1`, `2` become one child `{0..2}`, in place of the first numbered child.
    """
    numbers = sorted(int(label) for label in children if _NUMBER.fullmatch(label))
    # A frozen TreeNode is hashed by its content, so equal layers are one key: 32 layers give one group.
    groups: dict[TreeNode, list[int]] = {}
    for number in numbers:
        groups.setdefault(_sort_children(children[str(number)]), []).append(number)
    merged: list[TreeNode] = []
    for equal in groups.values():
        node = _multiply_counts(children[str(equal[0])], len(equal))
        texts = number_runs(equal, "..")
        if len(texts) > MAX_RUNS:
            texts[MAX_RUNS - 1 : -1] = ["…"]
        if len(equal) == 1:
            label = texts[0]
        else:
            label = f"{{{','.join(texts)}}}"
        merged.append(replace(node, labels=(label, *node.labels)))
    for label, child in children.items():
        if not _NUMBER.fullmatch(label):
            yield replace(child, labels=(label, *child.labels))
        elif merged:
            yield from merged
            merged = []


def _sort_children(node: TreeNode) -> TreeNode:
    """Return the node with its children sorted by label.

    Layers with the same tensors in another order then compare equal. The order differs in layers split between files.
    """
    children = sorted(map(_sort_children, node.children), key=lambda child: child.labels)
    return replace(node, children=tuple(children))


def _multiply_counts(node: TreeNode, count: int) -> TreeNode:
    children = tuple(_multiply_counts(child, count) for child in node.children)
    return replace(
        node, tensors=node.tensors * count, nbytes=node.nbytes * count, children=children
    )
