"""Tests of compiled plans: the collectives in HLO text, and the JSON form."""

from __future__ import annotations

import json

from trainer.planning.training_plan import Collective, CompiledPlan, read_collectives

HLO = """\
HloModule jit_train_step, is_scheduled=true

%all-reduce-scatter.1 (input.1: f32[8,64]) -> f32[8,16] {
  %input.1 = f32[8,64]{1,0} parameter(0)
  %all-reduce.1 = f32[8,64]{1,0:T(8,128)} all-reduce(%input.1), replica_groups={{0,1,2,3}}, to_apply=%add
}

%body (p: (f32[8,16])) -> (f32[8,16]) {
  %fusion.1 = f32[8,16]{1,0:T(8,128)} fusion(%p.1), kind=kCustom, calls=%all-reduce-scatter.1
  %ag = bf16[4,2,8]{2,1,0:T(8,128)(2,1)} all-gather(%copy), channel_id=1, dimensions={1}
  ROOT %fusion.2 = f32[8,16]{1,0} fusion(%p.1), kind=kLoop, calls=%fused_computation.1
}

ENTRY %main (p0: f32[4]) -> f32[] {
  %start = (bf16[24,4]{1,0:T(8,128)(2,1)}, bf16[24,4]{1,0}, u32[]{:S(2)}) collective-permute-start(%slice.1)
  %done = bf16[24,4]{1,0:T(8,128)(2,1)} collective-permute-done(%start)
  %all-reduce.2 = (f32[]{:T(128)}, pred[3]{0}) all-reduce(%a, %b), channel_id=3, to_apply=%add
  all-reduce.3 = s8[10]{0} all-reduce(c), to_apply=add
  ROOT %rs = f8e4m3fn[6]{0} reduce-scatter(%d), dimensions={0}
}
"""


def test_collectives_count_the_bytes_of_results():
    assert read_collectives(HLO) == (
        Collective("all-gather", 1, 4 * 2 * 8 * 2),
        Collective("all-reduce", 2, 4 + 3 + 10),
        Collective("collective-permute", 1, 24 * 4 * 2),
        Collective("reduce-scatter", 2, 8 * 16 * 4 + 6),
    )


def test_program_without_collectives_has_none():
    assert (
        read_collectives(
            "ENTRY %main (p0: f32[4]) -> f32[4] {\n  ROOT %p0 = f32[4]{0} parameter(0)\n}\n"
        )
        == ()
    )


def test_plan_survives_json():
    plan = CompiledPlan(
        "v5p:8x8x4",
        "blockwise",
        False,
        100,
        20,
        21,
        19,
        1.5,
        300,
        (Collective("all-gather", 2, 64),),
        "0.12.0.1",
        "0.0.50.1",
    )
    assert plan.peak_nbytes == 100 + 20 + 2
    assert plan.compiler == "jax 0.12.0.1, libtpu 0.0.50.1"
    assert CompiledPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
