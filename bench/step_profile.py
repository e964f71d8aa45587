"""Time of each function of the trainer in a compiled program on the CPU, from XLA's trace of one run.

Each instruction of the program has a stack of Python calls. Its time counts for the innermost function of the package
`trainer`, as `file:function`. The time of a loop excludes the instructions in it. Use one thread: the times of
instructions that run at the same moment are added.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Instructions without a stack, such as copies that XLA inserts
NO_FUNCTION = "(none)"
_PACKAGE = "/trainer/"
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# e.g. `%fused.3 = f32[8,64]{1,0} fusion(%dot.1), calls=%fusion.3, metadata={... stack_frame_id=7}`
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = .*?[)\]}] ([\w-]+)\(")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CALLED = re.compile(r"calls=%([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a program."""

    function: str  # `file:function` of the trainer
    is_product: bool  # Whether it multiplies matrices


def read_instructions(program: str) -> dict[str, Instruction]:
    """Return the instructions of a program's text by name."""
    functions = _frame_functions(program)
    products: set[str] = set()
    computation = ""
    opcodes: dict[str, tuple[str, str, str]] = {}
    for line in program.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split()[0].removeprefix("%")
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, opcode = match.groups()
        frame = _FRAME.search(line)
        called = _CALLED.search(line)
        function = NO_FUNCTION if frame is None else functions.get(int(frame[1]), NO_FUNCTION)
        opcodes[name] = opcode, function, called[1] if called else ""
        if opcode == "dot":
            products.add(computation)
    instructions: dict[str, Instruction] = {}
    for name, (opcode, function, called) in opcodes.items():
        instructions[name] = Instruction(function, opcode == "dot" or called in products)
    return instructions


def _frame_functions(program: str) -> dict[int, str]:
    """Return the innermost function of the trainer of each stack frame."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    rows: dict[int, str] = {}
    for line in program.splitlines():
        if line in tables:
            rows = tables[line]
        elif not line:
            rows = {}
        elif line[0].isdigit():
            number, _, row = line.partition(" ")
            rows[int(number)] = row
    locations = {key: dict(_FIELD.findall(row)) for key, row in tables["FileLocations"].items()}
    frames = {key: dict(_FIELD.findall(row)) for key, row in tables["StackFrames"].items()}
    functions: dict[int, str] = {}
    for number in frames:
        frame = number
        while True:
            location = locations[int(frames[frame]["file_location_id"])]
            path = tables["FileNames"][int(location["file_name_id"])].strip('"')
            if _PACKAGE in path:
                function = tables["FunctionNames"][int(location["function_name_id"])].strip('"')
                functions[number] = f"{Path(path).stem}:{function.rpartition('.')[2]}"
                break
            # XLA writes the number of the parent plus 1, e.g. 1 for none.
            frame = int(frames[frame].get("parent_frame_id", 0)) - 1
            if frame <= 0:
                break
    return functions


def profile_program(program: str, run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Run a program once, and return each function with its seconds in products and in other instructions.

    Args:
        program: Text of the compiled program.
        run: Runs it, and waits for its end.
    """
    import jax
    from jax.profiler import ProfileData

    instructions = read_instructions(program)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        lines = [line for plane in ProfileData.from_file(str(trace)).planes for line in plane.lines]
    products: dict[str, float] = {}
    others: dict[str, float] = {}
    for line in lines:
        events = [
            (event.start_ns, event.start_ns + event.duration_ns, event.name)
            for event in line.events
            if event.name in instructions
        ]
        for name, seconds in own_seconds(events).items():
            instruction = instructions[name]
            totals = products if instruction.is_product else others
            totals[instruction.function] = totals.get(instruction.function, 0.0) + seconds
    functions = dict.fromkeys((*products, *others))
    rows = [(name, products.get(name, 0.0), others.get(name, 0.0)) for name in functions]
    return sorted(rows, key=lambda row: -row[1] - row[2])


def own_seconds(events: Iterable[tuple[float, float, str]]) -> Mapping[str, float]:
    """Return the seconds of each name without the events inside it.

    Args:
        events: Begin and end in nanoseconds, and name, of the events of a thread. They are nested or apart.

    >>> own_seconds([(0.0, 5e9, "loop"), (1e9, 3e9, "product")])
    {'loop': 3.0, 'product': 2.0}
    """
    seconds: dict[str, float] = {}
    outer: list[tuple[float, str]] = []
    for begin_ns, end_ns, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while outer and outer[-1][0] <= begin_ns:
            outer.pop()
        duration_s = (end_ns - begin_ns) / 1e9
        if outer:
            seconds[outer[-1][1]] -= duration_s
        seconds[name] = seconds.get(name, 0.0) + duration_s
        outer.append((end_ns, name))
    return seconds
