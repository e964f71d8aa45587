"""Compile the steps that the memory estimate is tested with, and compare the compiler's plans with recorded figures.

    python -m bench.memory_points [--only TEXT]

A point is a training step for CPU devices or a TPU topology, as flags of `bench.compiled_step`, with the MiB that XLA
planned for one device: of the whole step, or of the temporaries of loss and gradients alone. The exit code is 1 if a
plan has changed by more than 2 %. Points for TPUs need the package libtpu, but no TPU.
Their figures are those of libtpu 0.0.50.1 with jax 0.12.0.1. libtpu 0.0.42.1 with jax 0.10.2 plans within 1.3 % of
them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from bench.compiled_step import make_manifest, make_parser, make_recipe
from bench.evidence import log
from prepcli.core.tables import format_table
from prepcli.models.mesh import Mesh, parse_mesh
from prepcli.models.rules import DEFAULT_RULES
from trainer.planning.memory_estimate import MemoryEstimate, estimate_memory
from trainer.planning.memory_inputs import MemoryInputs
from trainer.planning.model_shapes import model_of_manifest
from trainer.planning.step_inputs import step_inputs
from trainer.recipe import Recipe

MIB = 1 << 20
NUM_CPU_DEVICES = 8  # devices of this process, for the compilation of loss and gradients
MAX_CHANGE = 0.02
HEADER = ("point", "recorded MiB", "compiled MiB", "estimated MiB", "estimated / compiled")
DENSE = "--dtype float32 --kernel reference --ffn-chunk -1 "
TILES = "--dtype float32 --ffn-chunk -1 "
CHUNKS = "--dtype float32 --ffn-chunk 1024 "
TPU = "--topology v5p:8x8x4 --mesh 1,64,4 "
INPUT = " --remat nothing_saveable"
NO_REMAT = " --remat none"
DOTS = " --remat dots_saveable"
WEIGHT_DOTS = " --remat dots_with_no_batch_dims_saveable"


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A training step, and the memory that XLA planned for it.

    Attributes:
        flags: Flags of `bench.compiled_step`.
        recorded_mib: MiB of one device.
        is_whole: Whether they are those of arguments and temporaries of a whole step; temporaries of loss and gradients
            otherwise.
    """

    flags: str
    recorded_mib: int
    is_whole: bool = True

    @property
    def options(self) -> argparse.Namespace:
        """The flags as options."""
        return make_parser().parse_args(self.flags.split())

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return parse_mesh(self.options.mesh)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the step."""
        return make_recipe(self.options, self.mesh)

    @property
    def inputs(self) -> MemoryInputs:
        """The inputs of the estimate."""
        model = model_of_manifest(make_manifest(self.options.size)).shapes(self.mesh, DEFAULT_RULES)
        widens_bfloat16 = not self.options.topology
        return step_inputs(
            self.recipe, model, mesh=self.mesh, rules=DEFAULT_RULES, widens_bfloat16=widens_bfloat16
        )

    @property
    def estimate(self) -> MemoryEstimate:
        """The estimate of the whole step."""
        return estimate_memory(self.inputs)

    @property
    def estimated_nbytes(self) -> int:
        """The estimated bytes of what is recorded."""
        return self.estimate.peak if self.is_whole else self.estimate.activations


def whole_steps(*points: tuple[str, int]) -> list[MemoryPoint]:
    """Return points of whole steps from their flags and MiB."""
    return [MemoryPoint(flags, mib) for flags, mib in points]


def gradients(*points: tuple[str, int]) -> list[MemoryPoint]:
    """Return points of the temporaries of loss and gradients from their flags and MiB."""
    return [MemoryPoint(flags, mib, is_whole=False) for flags, mib in points]


SMALL_POINTS = whole_steps(
    (f"{DENSE}--tokens 2048{NO_REMAT}", 1851),
    (f"{DENSE}--tokens 2048{INPUT}", 1389),
    (f"{DENSE}--tokens 2048 --remat dots_saveable", 1611),
    (f"{DENSE}--tokens 2048 --remat dots_with_no_batch_dims_saveable", 1434),
    (f"{DENSE}--tokens 8192{NO_REMAT}", 16160),
    (f"{DENSE}--tokens 8192{INPUT}", 9326),
)
DEEP_POINTS = whole_steps(
    (f"--size deep {DENSE}--rows 4 --tokens 256{NO_REMAT}", 1729),
    (f"--size deep {DENSE}--rows 4 --tokens 256{INPUT}", 1495),
    (f"--size deep {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 4585),
    (f"--size deep {DENSE}--rows 4 --tokens 1024 --remat everything_saveable", 5850),
    (f"--size deep {DENSE}--rows 4 --tokens 1024 --remat dots_saveable", 3528),
)
MESH_POINTS = whole_steps(
    (f"--size deep {DENSE}--mesh 1,2,4 --rows 4 --tokens 1024{NO_REMAT}", 615),
    (f"--size deep {DENSE}--mesh 1,2,4 --rows 4 --tokens 1024{INPUT}", 273),
    (f"--size mixtral {DENSE}--mesh 1,2,4 --rows 4 --tokens 1024{INPUT}", 353),
    (f"--size 7b {DENSE}--mesh 1,64,4 --tokens 2048{NO_REMAT}", 12619),
    (f"--size 7b {DENSE}--mesh 1,64,4 --tokens 2048{INPUT}", 1771),
)
FAMILY_POINTS = whole_steps(
    (f"--size gpt_neo {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3125),
    (f"--size gpt_neo {DENSE}--rows 4 --tokens 1024{INPUT}", 2202),
    (f"--size gpt_neox {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2789),
    (f"--size gpt_neox {DENSE}--rows 4 --tokens 1024{INPUT}", 1578),
    (f"--size gemma2 {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 4160),
    (f"--size gemma2 {DENSE}--rows 4 --tokens 1024{INPUT}", 2192),
    (f"--size mixtral {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3590),
    (f"--size mixtral {DENSE}--rows 4 --tokens 1024{INPUT}", 2537),
    (f"--size mixtral {DENSE}--rows 4 --tokens 1024 --remat dots_saveable", 3143),
    (f"--size qwen3_moe {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3351),
    (f"--size qwen3_moe {DENSE}--rows 4 --tokens 1024{INPUT}", 2325),
    (f"--size deepseek_v3 {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 4104),
    (f"--size deepseek_v3 {DENSE}--rows 4 --tokens 1024{INPUT}", 2954),
    (f"--size gpt_oss {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3954),
    (f"--size gpt_oss {DENSE}--rows 4 --tokens 1024{INPUT}", 3153),
    (f"--size t5 {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 6303),
    (f"--size t5 {DENSE}--rows 4 --tokens 1024{INPUT}", 2557),
    (f"--size apertus {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2835),
    (f"--size apertus {DENSE}--rows 4 --tokens 1024{INPUT}", 1627),
    (f"--size diffllama {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2922),
    (f"--size diffllama {DENSE}--rows 4 --tokens 1024{INPUT}", 1604),
    (f"--size diffllama {CHUNKS}--rows 1 --tokens 8192{INPUT}", 1315),
    (f"--size doge {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2956),
    (f"--size doge {DENSE}--rows 4 --tokens 1024{INPUT}", 1653),
    (f"--size doge {TILES}--rows 4 --tokens 2048{INPUT}", 1654),
)
RECURRENT_POINTS = whole_steps(
    (f"--size lfm2 {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2745),
    (f"--size lfm2 {DENSE}--rows 4 --tokens 1024{INPUT}", 1978),
    (f"--size qwen3_5 {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3907),
    (f"--size qwen3_5 {DENSE}--rows 4 --tokens 1024{INPUT}", 2848),
    (f"--size qwen3_next {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 5239),
    (f"--size qwen3_next {DENSE}--rows 4 --tokens 1024{INPUT}", 4265),
    (f"--size mamba2 {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2518),
    (f"--size mamba2 {DENSE}--rows 4 --tokens 1024{INPUT}", 1448),
    (f"--size bamba {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3976),
    (f"--size bamba {DENSE}--rows 4 --tokens 1024{INPUT}", 2637),
    (f"--size granite_hybrid {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 4285),
    (f"--size granite_hybrid {DENSE}--rows 4 --tokens 1024{INPUT}", 3119),
    (f"--size lfm2-first {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 2855),
    (f"--size lfm2-first {DENSE}--rows 4 --tokens 1024{INPUT}", 2129),
    (f"--size qwen3_5-period {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 3086),
    (f"--size qwen3_5-period {DENSE}--rows 4 --tokens 1024{INPUT}", 2940),
    (f"--size lfm2 {DENSE}--rows 4 --tokens 1024{DOTS}", 2503),
    (f"--size lfm2 {DENSE}--rows 4 --tokens 1024{WEIGHT_DOTS}", 2273),
    (f"--size mamba2 {DENSE}--rows 4 --tokens 1024{DOTS}", 2234),
    (f"--size mamba2 {DENSE}--rows 4 --tokens 1024{WEIGHT_DOTS}", 1652),
    (f"--size bamba {DENSE}--rows 4 --tokens 1024{DOTS}", 3733),
    (f"--size bamba {DENSE}--rows 4 --tokens 1024{WEIGHT_DOTS}", 2981),
    (f"--size qwen3_5 {DENSE}--rows 4 --tokens 1024{DOTS}", 3791),
    (f"--size qwen3_5 {DENSE}--rows 4 --tokens 1024{WEIGHT_DOTS}", 3133),
    (f"--size lfm2 {CHUNKS}--rows 1 --tokens 8192{INPUT}", 1590),
    (f"--size qwen3_5 {CHUNKS}--rows 1 --tokens 8192{INPUT}", 2912),
    (f"--size mamba2 {CHUNKS}--rows 1 --tokens 8192{INPUT}", 1571),
    (f"--size mamba {DENSE}--rows 1 --tokens 8192{NO_REMAT}", 3183),
    (f"--size mamba {DENSE}--rows 1 --tokens 8192{INPUT}", 1395),
    (f"--size mamba {DENSE}--rows 1 --tokens 8192{DOTS}", 2116),
    (f"--size mamba {DENSE}--rows 1 --tokens 8192{WEIGHT_DOTS}", 1919),
    (f"--size mamba {CHUNKS}--rows 1 --tokens 8192{NO_REMAT}", 3301),
    (f"--size mamba {CHUNKS}--rows 1 --tokens 8192{INPUT}", 1310),
    (f"--size jamba {DENSE}--rows 4 --tokens 1024{NO_REMAT}", 4847),
    (f"--size jamba {DENSE}--rows 4 --tokens 1024{INPUT}", 4801),
    (f"--size jamba {CHUNKS}--rows 1 --tokens 8192{INPUT}", 4506),
)
LENGTH_POINTS = gradients(
    (f"{DENSE}--tokens 8192{NO_REMAT}", 15386),
    (f"{DENSE}--tokens 8192{INPUT}", 8925),
    (f"{DENSE}--tokens 32768{INPUT}", 140746),
    (f"{TILES}--tokens 32768{INPUT}", 2528),
    (f"{CHUNKS}--tokens 2048{INPUT}", 175),
    (f"{CHUNKS}--tokens 8192{INPUT}", 365),
    (f"{CHUNKS}--tokens 32768{INPUT}", 1282),
    (f"--dtype bfloat16 --ffn-chunk 1024 --tokens 32768{INPUT}", 1014),
    (f"{CHUNKS}--tokens 131072{INPUT}", 4982),
    (f"{CHUNKS}--mesh sp:2 --tokens 32768{INPUT}", 856),
    (f"{CHUNKS}--mesh sp:4 --tokens 32768{INPUT}", 520),
    (f"{CHUNKS}--mesh fsdp:2,mp:2,sp:2 --tokens 32768{INPUT}", 500),
)
NAME_POINTS = gradients(
    (f"--size deep {TILES}--tokens 4096 --remat q+k+v", 658),
    (f"--size deep {TILES}--tokens 4096 --remat q+k+v+attention_output", 731),
    (f"--size deep {TILES}--tokens 4096 --remat o+mlp_hidden", 772),
    (f"--size gpt_neox {TILES}--tokens 2048 --remat attention_output+mlp_hidden", 290),
    (f"--size gemma2 {TILES}--tokens 2048{INPUT}", 328),
    (f"--size gemma2 {TILES}--tokens 2048 --remat o+mlp_output", 355),
    (f"--size deep {TILES}--mesh 1,2,4 --tokens 2048{INPUT}", 110),
    (f"--size deep {TILES}--mesh 1,2,4 --tokens 2048 --remat q+k+v+attention_output", 142),
    (f"--size thin-head {TILES}--mesh 1,2,4 --tokens 2048 --remat q+k+v+attention_output", 106),
    (f"--size thin-head {TILES}--mesh 1,2,4 --tokens 2048 --remat o", 80),
    (f"--size thin-head {TILES}--mesh 1,2,4 --tokens 2048 --remat mlp_hidden", 112),
)
TPU_POINTS = whole_steps(
    (f"--size 7b {TPU}--ffn-chunk -1", 6155),
    (f"--size 7b {TPU}--ffn-chunk 2048", 5483),
    (f"--size 13b {TPU}--ffn-chunk 2048", 7790),
    (f"--size 7b {TPU}--ffn-chunk 2048 --q-chunk 2048 --k-chunk 4096", 5458),
)
SMALL_TPU_POINTS = whole_steps(
    ("--size deep --topology v5p:2x2x2 --mesh 1,8,1 --rows 32 --tokens 2048 --ffn-chunk -1", 725),
)
POINTS = (
    SMALL_POINTS
    + DEEP_POINTS
    + MESH_POINTS
    + FAMILY_POINTS
    + RECURRENT_POINTS
    + LENGTH_POINTS
    + NAME_POINTS
    + TPU_POINTS
    + SMALL_TPU_POINTS
)


def compiled_nbytes(point: MemoryPoint) -> int:
    """Compile the step of a point and return the bytes that XLA plans for it."""
    from trainer.training.compiled_plan import compiled_plan

    if point.is_whole:
        manifest = make_manifest(point.options.size)
        return compiled_plan(point.recipe, manifest, point.mesh, point.options.topology).peak_nbytes
    return _gradients_nbytes(point)


def _gradients_nbytes(point: MemoryPoint) -> int:
    """Compile loss and gradients in this process and return the bytes of temporaries."""
    import jax

    from bench.compiled_memory import compile_step
    from trainer.distributed.sharding import make_sharding_context
    from trainer.nn.model_spec import model_from_manifest
    from trainer.training.setup import build_step_setup

    recipe, mesh = point.recipe, point.mesh
    model = model_from_manifest(make_manifest(point.options.size))
    sharding = make_sharding_context(mesh, devices=jax.devices("cpu")[: mesh.n_devices])
    setup = build_step_setup(
        recipe, model, sharding=sharding, kernel=recipe.model.attention_kernel, steps=1
    )
    assert recipe.batch.size is not None
    return compile_step(
        model, setup.forward_config, recipe.batch.size, recipe.data.seq_length
    ).temp_nbytes


def measure(points: Iterable[MemoryPoint]) -> Iterable[tuple[MemoryPoint, int]]:
    """Yield each point with the bytes that XLA plans for it now."""
    for point in points:
        nbytes = compiled_nbytes(point)
        log(f"{point.flags}: {nbytes / MIB:,.0f} MiB, recorded {point.recorded_mib:,}")
        yield point, nbytes


def points_text(plans: Sequence[tuple[MemoryPoint, int]]) -> str:
    """Return a table with a line per point."""
    lines = [
        (
            point.flags + ("" if point.is_whole else " (gradients)"),
            f"{point.recorded_mib:,}",
            f"{nbytes / MIB:,.0f}",
            f"{point.estimated_nbytes / MIB:,.0f}",
            f"{point.estimated_nbytes / nbytes:.2f}",
        )
        for point, nbytes in plans
    ]
    return format_table(lines, HEADER, right_aligned=HEADER[1:])


def has_changed(point: MemoryPoint, nbytes: int) -> bool:
    """Return whether a plan differs from the recorded figure by more than `MAX_CHANGE`."""
    return abs(nbytes / MIB - point.recorded_mib) > MAX_CHANGE * point.recorded_mib


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the points, print the table, and return 1 if a plan has changed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory_points", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="points whose flags contain TEXT (default: all)"
    )
    only: str = parser.parse_args(arguments).only
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(NUM_CPU_DEVICES))
    has_libtpu = find_spec("libtpu") is not None
    plans = list(
        measure(p for p in POINTS if only in p.flags and (has_libtpu or not p.options.topology))
    )
    print(points_text(plans))
    return int(any(has_changed(point, nbytes) for point, nbytes in plans))


if __name__ == "__main__":
    raise SystemExit(main())
