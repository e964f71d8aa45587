"""Draw the packages and their imports: `python -m tools.package_diagram > docs/explanation/packages.svg`.

Every package stands above all packages that it imports. An arrow that follows from others is left out, so that A -> B
-> C stands for an import of C by A too. The layout is that of Sugiyama et al. 1981 (https://doi.org/10.1109/TSMC.1981.4308636):
layers by longest path, long arrows through dummy nodes, and an order of each layer by the mean of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tools.import_graph import package_graph, read_graph

Imports = Mapping[str, set[str]]
BOX_WIDTH, BOX_HEIGHT, DUMMY_WIDTH = 132, 28, 40
GAP, LAYER_HEIGHT, MARGIN = 24, 52, 16
SWEEPS = 12
COLORS = {"prepcli": "#dbeafe", "trainer": "#fde9d0"}  # colors of the boxes, by top-level package
STYLE = (
    "rect{stroke:#64748b}text{font:13px sans-serif;text-anchor:middle;fill:#0f172a}"
    "polyline{fill:none;stroke:#64748b;stroke-width:1.4;marker-end:url(#tip)}"
)
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#64748b"/></marker>'
)


@dataclass(slots=True)
class Node:
    """A node of a layer: a package, or a dummy (without a name) that a long arrow passes."""

    name: str = ""
    x: float = 0
    below: list[Node] = field(default_factory=list)
    above: list[Node] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Width of the box or of the passage."""
        return BOX_WIDTH if self.name else DUMMY_WIDTH


def reachable(imports: Imports, package: str) -> set[str]:
    """Return all packages that a package imports, directly or not."""
    reached: set[str] = set()
    queue = [package]
    while queue:
        new = imports[queue.pop()] - reached
        reached |= new
        queue += new
    return reached


def transitive_reduction(imports: Imports) -> dict[str, set[str]]:
    """Return the transitive reduction of the imports."""
    implied = {
        package: {name for other in names for name in reachable(imports, other)}
        for package, names in imports.items()
    }
    return {package: names - implied[package] for package, names in imports.items()}


def layer_numbers(imports: Imports) -> dict[str, int]:
    """Return the layer of each package, 0 at the top: below all packages that import it."""
    numbers: dict[str, int] = {}

    def number(package: str) -> int:
        users = [user for user, names in imports.items() if package in names]
        if package not in numbers:
            numbers[package] = 1 + max(map(number, users), default=-1)
        return numbers[package]

    return {package: number(package) for package in imports}


def lay_out(imports: Imports) -> list[list[Node]]:
    """Return the layers, the top one first, with the position of each node."""
    numbers = layer_numbers(imports)
    layers: list[list[Node]] = [[] for _ in range(max(numbers.values()) + 1)]
    nodes = {package: Node(package) for package in sorted(imports)}
    for package, node in nodes.items():
        layers[numbers[package]].append(node)
    for package, names in sorted(imports.items()):
        for name in sorted(names):
            _connect(layers, numbers[package], nodes[package], nodes[name], numbers[name])
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 else reversed(layers):
            _order(layer, is_downward=bool(sweep % 2))
    return layers


def _connect(
    layers: Sequence[list[Node]], number: int, upper: Node, lower: Node, last_number: int
) -> None:
    """Connect two nodes, with a dummy node in every layer between them."""
    for layer in layers[number + 1 : last_number]:
        dummy = Node()
        layer.append(dummy)
        upper.below.append(dummy)
        dummy.above.append(upper)
        upper = dummy
    upper.below.append(lower)
    lower.above.append(upper)


def _order(layer: list[Node], is_downward: bool) -> None:
    """Order a layer by the mean position of the neighbours on one side, and centre it."""

    def mean(node: Node) -> float:
        neighbours = node.above if is_downward else node.below
        return sum(other.x for other in neighbours) / len(neighbours) if neighbours else node.x

    layer.sort(key=mean)
    x = -(sum(node.width + GAP for node in layer) - GAP) / 2
    for node in layer:
        node.x = x + node.width / 2
        x += node.width + GAP


def draw(imports: Imports) -> str:
    """Return the picture as SVG."""
    layers = lay_out(transitive_reduction(imports))
    width = max(sum(node.width + GAP for node in layer) for layer in layers) + 2 * MARGIN
    height = len(layers) * LAYER_HEIGHT - (LAYER_HEIGHT - BOX_HEIGHT) + 2 * MARGIN
    tops = [MARGIN + number * LAYER_HEIGHT for number in range(len(layers))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>Packages of prep and their imports</title><style>{STYLE}</style><defs>{TIP}</defs>",
        f'<rect width="{width}" height="{height}" fill="#ffffff" style="stroke:none"/>',
    ]
    for layer, top in zip(layers, tops):
        for node in layer:
            parts += _arrows(node, top, width / 2)
    for layer, top in zip(layers, tops):
        parts += [_box(node, top, width / 2) for node in layer if node.name]
    return "\n".join([*parts, "</svg>\n"])


def _arrows(node: Node, top: int, middle: float) -> Iterator[str]:
    """Yield the arrows that start at a package."""
    for lower in node.below if node.name else ():
        points, y = [(node.x, top + BOX_HEIGHT)], top + LAYER_HEIGHT
        while not lower.name:
            points += [(lower.x, y), (lower.x, y + BOX_HEIGHT)]
            (lower,), y = lower.below, y + LAYER_HEIGHT
        text = " ".join(f"{x + middle:.0f},{y}" for x, y in [*points, (lower.x, y)])
        yield f'<polyline points="{text}" data-from="{node.name}" data-to="{lower.name}"/>'


def _box(node: Node, top: int, middle: float) -> str:
    x, color = node.x + middle, COLORS[node.name.partition(".")[0]]
    corner = (
        f'x="{x - BOX_WIDTH / 2:.0f}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"'
    )
    return f'<rect {corner} fill="{color}"/><text x="{x:.0f}" y="{top + 19}">{node.name}</text>'


if __name__ == "__main__":
    print(draw(package_graph(read_graph())), end="")
