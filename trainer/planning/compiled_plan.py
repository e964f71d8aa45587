"""The plan of a compiled training step for one device: its memory and its collectives. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prepcli.core.json_values import JsonObject

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# An asynchronous operation is counted at its `-done` line, because only this line has the type of
# the result. A TPU reduces and scatters in a fusion named after both. The all-reduce inside that
# fusion has the operand's type, so `read_collectives` skips the fusion's body.
_COLLECTIVE = re.compile(
    rf"^ +(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) "
    rf"(?:(?P<kind>{_KINDS})(?:-done)?\(|fusion\(.*calls=%?all-reduce-scatter)"
)
_FUSED_REDUCE_SCATTER = re.compile(r"^%?all-reduce-scatter[\w.-]* \(")
# Type and extents of an array in HLO text, e.g. `bf16[8,128]`: bits of an element, and the extents.
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)[a-z\d]*)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Collective:
    """The collective operations of one kind in a compiled step."""

    kind: str  # Name of the operation in HLO, such as all-gather
    count: int  # Operations in the program. One in a loop counts once.
    nbytes: int  # Bytes of their results on one device


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """The compiler's plan of a training step. Bytes are per device."""

    target: str  # The devices, such as `v5p:8x8x4` or `8 CPU devices`
    kernel: str  # Name of the attention kernel
    # Whether accelerators need less: XLA computes bfloat16 in float32 on CPUs, and keeps both
    is_upper_bound: bool
    temp_nbytes: int  # Temporary arrays
    argument_nbytes: int  # The training state and the batch
    output_nbytes: int  # The new training state and the metrics
    alias_nbytes: int  # Outputs that take the place of arguments
    compile_s: float  # Seconds of tracing and compiling
    host_nbytes: int  # Largest resident memory of the process that compiled
    collectives: tuple[Collective, ...]  # The collective operations by kind
    jax_version: str  # Version of jax
    libtpu_version: str  # Version of libtpu, the compiler of TPUs. Empty for other devices.

    @property
    def compiler(self) -> str:
        """The versions that compiled it, e.g. `jax 0.12.0.1, libtpu 0.0.50.1`. Another one may plan other figures."""
        if not self.libtpu_version:
            return f"jax {self.jax_version}"
        return f"jax {self.jax_version}, libtpu {self.libtpu_version}"

    @property
    def peak_nbytes(self) -> int:
        """Bytes that the step needs: temporary arrays, arguments, and outputs that do not alias them."""
        return self.temp_nbytes + self.argument_nbytes + self.output_nbytes - self.alias_nbytes

    def to_json(self) -> JsonObject:
        """Return the plan as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CompiledPlan:
        """Return the plan of a JSON object that `to_json` returned."""
        collectives = tuple(Collective(**collective) for collective in fields["collectives"])
        return cls(**{**fields, "collectives": collectives})


def read_collectives(hlo: str) -> tuple[Collective, ...]:
    """Return the collective operations in the text of a compiled HLO module, sorted by kind."""
    sizes: dict[str, list[int]] = {}
    is_fused = False
    for line in hlo.splitlines():
        if not line.startswith(" "):
            is_fused = bool(_FUSED_REDUCE_SCATTER.match(line))
        elif not is_fused and (match := _COLLECTIVE.match(line)):
            sizes.setdefault(match["kind"] or "reduce-scatter", []).append(
                _type_nbytes(match["type"])
            )
    return tuple(
        Collective(kind, len(nbytes), sum(nbytes)) for kind, nbytes in sorted(sizes.items())
    )


def _type_nbytes(hlo_type: str) -> int:
    """Return the bytes of the arrays in an HLO type, such as `(bf16[2,8]{1,0}, f32[])`."""
    return sum(
        # `pred` has no number of bits and takes a byte. A scalar has no extents: its product is 1.
        math.prod(map(int, filter(None, extents.split(",")))) * int(bits or 8) // 8
        for bits, extents in _ARRAY.findall(hlo_type)
    )
