"""Count the functions of a command: `python -m tools.trace [OPTION ...] prep COMMAND ...`.

The command runs in this process. Only functions of `prepcli` and `trainer` count, in all threads. The bodies of
modules, classes and comprehensions are left out. Workers and other processes are not seen.

    $ python -m tools.trace --tree prep save-init models/tiny --out models/tiny-init --mesh 1,2,1
    ...
    708 functions in 117 modules, 22 frames deep
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
PACKAGES = ("prepcli", "trainer")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(slots=True)
class Call:
    """A node of the call tree: one function, called from one path of functions.

    Attributes:
        function: Module and qualified name, e.g. `prepcli.engine.files.Files.write`. Empty for the root.
        count: Number of calls. Each resumption of a generator counts as a call.
        callees: The functions called from here, by name, in the order of their first calls.
    """

    function: str
    count: int = 0
    callees: dict[str, Call] = field(default_factory=dict)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Call]]:
        """Yield all nodes below this one with their depths, where 1 is a direct callee."""
        for callee in self.callees.values():
            yield depth + 1, callee
            yield from callee.walk(depth + 1)


class Tracer:
    """Records the calls of functions of `prepcli` and `trainer` in this thread and in threads started later.

    Used as a context manager. `root` is the call tree. The first function of each thread is a callee of the root.
    """

    def __init__(self) -> None:
        self.root = Call("")
        self.modules: set[str] = set()
        # None for code that does not count
        self._names: dict[CodeType, str | None] = {}
        self._stacks = threading.local()

    def __enter__(self) -> Tracer:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Push a node at a call, and pop it at the return. Exceptions and yields are returns, too."""
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = self._function_name(code)
        name = self._names[code]
        if name is None:
            return
        if not hasattr(self._stacks, "calls"):
            self._stacks.calls = [self.root]
        stack: list[Call] = self._stacks.calls
        if event == "call":
            call = stack[-1].callees.setdefault(name, Call(name))
            call.count += 1
            stack.append(call)
        elif stack[-1].function == name:
            # Functions that were running before the trace began return without a node.
            stack.pop()

    def _function_name(self, code: CodeType) -> str | None:
        """Return the module and the qualified name of a function, or None if it does not count."""
        # Functions have optimized locals. The bodies of modules and classes do not.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in COMPREHENSIONS
        path = Path(code.co_filename)
        if not is_function or not path.is_relative_to(ROOT):
            return None
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in PACKAGES:
            return None
        module = ".".join(parts)
        self.modules.add(module)
        return f"{module}.{code.co_qualname}"


def summary_line(tracer: Tracer) -> str:
    """Describe a trace: the number of distinct functions, of modules, and of frames on the deepest stack."""
    functions = {call.function for _, call in tracer.root.walk()}
    deepest = max((depth for depth, _ in tracer.root.walk()), default=0)
    return f"{len(functions)} functions in {len(tracer.modules)} modules, {deepest} frames deep"


def deepest_stack(root: Call) -> list[str]:
    """Return the functions on the deepest stack, the outermost one first."""
    deepest: list[str] = []
    stack: list[str] = []
    for depth, call in root.walk():
        stack[depth - 1 :] = [call.function]
        if depth > len(deepest):
            deepest = list(stack)
    return deepest


def tree_lines(root: Call) -> Iterator[str]:
    """Yield the call tree, one line per node, indented by its depth, e.g. `  3 x prepcli.commands.cli.root.prep`."""
    for depth, call in root.walk():
        yield f"{'  ' * (depth - 1)}{call.count} x {call.function}"


def count_by_package(root: Call) -> dict[str, int]:
    """Return the number of distinct functions of each package, e.g. `prepcli.engine`, the largest number first."""
    counts: dict[str, int] = {}
    for function in {call.function for _, call in root.walk()}:
        package = ".".join(function.split(".")[:2])
        counts[package] = counts.get(package, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def count_callers(root: Call, function: str) -> dict[str, int]:
    """Return the number of calls of a function by each caller. The root of a thread has the caller ``.

    Args:
        root: The call tree.
        function: The end of the function's name, e.g. `write` or `Files.write`.

    Returns:
        Numbers of calls, the most frequent caller first.
    """
    counts: dict[str, int] = {}
    for call in (root, *(call for _, call in root.walk())):
        for callee in call.callees.values():
            if f".{callee.function}".endswith(f".{function}"):
                counts[call.function] = counts.get(call.function, 0) + callee.count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def run_command(args: Sequence[str]) -> tuple[int, Tracer]:
    """Run a command of `prep` in this process.

    Args:
        args: Words of the command line without the program's name.

    Returns:
        The exit code and the trace. The imports of the command line itself are not part of it.
    """
    from prepcli.commands.cli.main import main as prep

    with Tracer() as tracer:
        code = prep(args)
    return code, tracer


def main(args: Sequence[str] | None = None) -> int:
    """Run a command, print its trace after its output, and return its exit code."""
    parser = argparse.ArgumentParser("python -m tools.trace", description=__doc__)
    parser.add_argument("--tree", action="store_true", help="print the call tree with counts")
    parser.add_argument("--deepest", action="store_true", help="print the deepest stack")
    parser.add_argument("--packages", action="store_true", help="print the functions per package")
    parser.add_argument("--callers", metavar="FUNCTION", help="print the callers of a function")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="prep COMMAND ...")
    options = parser.parse_args(args)
    if options.command[:1] != ["prep"]:
        parser.error("the command must begin with `prep`")
    code, tracer = run_command(options.command[1:])
    if options.tree:
        print(*tree_lines(tracer.root), sep="\n")
    if options.deepest:
        print(*deepest_stack(tracer.root), sep="\n")
    if options.packages:
        for package, count in count_by_package(tracer.root).items():
            print(f"{count} in {package}")
    if options.callers:
        for caller, count in count_callers(tracer.root, options.callers).items():
            print(f"{count} x {caller or 'a thread'}")
    print(summary_line(tracer))
    return code


if __name__ == "__main__":
    sys.exit(main())
