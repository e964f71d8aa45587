"""Names as a tree: sizes summed by branch, equal layers shown once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prepcli.console.formatting import format_bytes
from prepcli.inspection.contents import TensorEntry

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
MAX_RUNS = 4  # of numbers that are spelled out
SELF_LABEL = "(itself)"  # a tensor whose name begins the names of others


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A branch, or a leaf that stands for `tensors` tensors of one shape and dtype; `nbytes` is that of all of them.

    `labels`: several where a branch holds nothing else: `layers`, `{0..31}`.
    """

    labels: tuple[str, ...]
    tensors: int
    nbytes: int
    dtype: str = ""  # of a leaf
    shape: tuple[int, ...] = ()
    children: tuple[TreeNode, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(self.labels)


@dataclass(slots=True)
class _TreeBuilder:
    entry: TensorEntry | None = None
    children: dict[str, _TreeBuilder] = field(default_factory=dict)


def build_tree(entries: Iterable[TensorEntry]) -> tuple[TreeNode, ...]:
    """The tree of these entries, in their order."""
    root = _TreeBuilder()
    for entry in entries:
        at = root
        for part in entry.path:
            at = at.children.setdefault(part, _TreeBuilder())
        at.entry = entry
    made = _freeze(root)
    return (made,) if made.labels else made.children


def tree_rows(nodes: Sequence[TreeNode], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    """(name, shape, dtype, size) a node, names indented by depth."""
    for node in nodes:
        times = f"{node.tensors} x " if node.tensors > 1 else ""
        shape = f"{times}{list(node.shape)}" if node.dtype else ""
        yield f"{'  ' * depth}{node.name}", shape, node.dtype, format_bytes(node.nbytes)
        yield from tree_rows(node.children, depth + 1)


def count_nodes(nodes: Sequence[TreeNode]) -> int:
    """Return how many rows `tree_rows` gives."""
    return sum(1 + count_nodes(node.children) for node in nodes)


def tree_fields(node: TreeNode) -> dict[str, object]:
    """A node for JSON: a leaf has shape and dtype, a branch has children."""
    common: dict[str, object] = {"name": node.name, "tensors": node.tensors, "bytes": node.nbytes}
    if node.dtype:
        return common | {"shape": node.shape, "dtype": node.dtype}
    return common | {"children": [tree_fields(child) for child in node.children]}


def _freeze(builder: _TreeBuilder) -> TreeNode:
    """A node without the label that its parent gives it; one that has a single child and is nothing else is that."""
    children = tuple(_merge_numbered({label: _freeze(child) for label, child in builder.children.items()}))
    entry = builder.entry
    if entry is None:
        return children[0] if len(children) == 1 else _make_branch(children)
    own = TreeNode((), 1, entry.nbytes, entry.dtype, entry.shape)
    return _make_branch((replace(own, labels=(SELF_LABEL,)), *children)) if children else own


def _make_branch(children: tuple[TreeNode, ...]) -> TreeNode:
    return TreeNode((), sum(c.tensors for c in children), sum(c.nbytes for c in children), children=children)


def _merge_numbered(children: Mapping[str, TreeNode]) -> Iterator[TreeNode]:
    """The children with their labels; numbered ones that are equal as one, where the first of the numbers stands."""
    numbers = sorted(int(label) for label in children if _NUMBER.fullmatch(label))
    groups: dict[TreeNode, list[int]] = {}
    for number in numbers:
        groups.setdefault(_sort_children(children[str(number)]), []).append(number)
    numbered = [_repeated(children[str(found[0])], _format_numbers(found), len(found)) for found in groups.values()]
    for label, child in children.items():
        if not _NUMBER.fullmatch(label):
            yield replace(child, labels=(label, *child.labels))
        elif numbered:
            yield from numbered
            numbered = []


def _sort_children(node: TreeNode) -> TreeNode:
    """The same node however its files order it: where a layer begins a file, its tensors come in another order."""
    return replace(node, children=tuple(sorted(map(_sort_children, node.children), key=lambda child: child.labels)))


def _repeated(node: TreeNode, label: str, count: int) -> TreeNode:
    many = _multiplied(node, count)
    return replace(many, labels=(label, *many.labels))


def _multiplied(node: TreeNode, count: int) -> TreeNode:
    children = tuple(_multiplied(child, count) for child in node.children)
    return replace(node, tensors=node.tensors * count, nbytes=node.nbytes * count, children=children)


def _format_numbers(numbers: Sequence[int]) -> str:
    """`7`, `{0..31}`, `{0..3,8..11}`, and for many runs `{0,2,4,…,46}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    if len(texts) > MAX_RUNS:
        texts[MAX_RUNS - 1 : -1] = ["…"]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"
