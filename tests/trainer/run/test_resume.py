"""Whether a run may resume with other keys, data or another learning rate schedule."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.runs import make_job, make_setup
from trainer.recipe.lr_schedule import LRSchedule
from trainer.run.resume import check_changed_keys, check_resumable

STEPS, MORE_STEPS = 20, 30


def schedule(kind: Any, **changes: Any) -> LRSchedule:
    """Return the schedule of a run of STEPS steps."""
    fields: dict[str, Any] = {"peak": 1e-2, "end": 1e-3, "warmup": 3, "decay": STEPS}
    return LRSchedule(kind=kind, **(fields | changes))


def check(before: LRSchedule, after: LRSchedule) -> None:
    """Check that a run with one schedule may resume with another one."""
    job = make_job(
        make_setup(), steps=MORE_STEPS, manifest_fields={"rate": after.manifest_fields()}
    )
    check_resumable({"rate": before.manifest_fields()}, job, changed={}, step=1)


@pytest.mark.parametrize("kind", ["constant", "rsqrt"])
def test_schedule_without_a_decay_can_be_extended(kind: str):
    check(schedule(kind), schedule(kind, decay=MORE_STEPS, end=0.0))
    with pytest.raises(PrepError, match="warmup 3 -> 4"):
        check(schedule(kind), schedule(kind, warmup=4, decay=MORE_STEPS))


def test_error_names_the_changed_schedule():
    with pytest.raises(PrepError) as caught:
        check(schedule("linear"), schedule("wsd", cooldown=5))
    assert caught.value.what == "the learning rate schedule has changed since the run began"
    assert caught.value.why == 'kind "linear" -> "wsd", cooldown not set -> 5'
    assert caught.value.hint.startswith("`--restart`")


def test_later_end_of_the_decay_has_a_hint():
    with pytest.raises(PrepError, match="decay 20 -> 30") as caught:
        check(schedule("cosine"), schedule("cosine", decay=MORE_STEPS))
    assert caught.value.hint.startswith("`--set optimizer.decay_steps=20` keeps it; `--restart`")


def test_cooldown_derived_from_a_later_end_has_the_hint_too():
    with pytest.raises(PrepError, match="decay 20 -> 30, cooldown 2 -> 3") as caught:
        check(schedule("wsd", cooldown=2), schedule("wsd", decay=MORE_STEPS, cooldown=3))
    assert caught.value.hint.startswith("`--set optimizer.decay_steps=20` keeps")


@pytest.mark.parametrize("key", ["data.path", "data.eval_path", "data.tokenizer"])
def test_moved_data_may_have_another_path(key: str):
    job = make_job(make_setup(), manifest_fields={"data": "digest"})
    changed = {key: (("a",), ("b",))}
    check_changed_keys(changed)
    check_resumable({"data": "digest"}, job, changed=changed, step=1)
    with pytest.raises(
        PrepError, match="the data has changed since the run began - other digest, now digest"
    ):
        check_resumable({"data": "other digest"}, job, changed=changed, step=1)


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({"path": "moved.txt"}, True),
        ({"eval_path": ["b", "c"]}, True),
        ({"weight": 2.0}, False),
        ({"name": "x"}, False),
    ],
)
def test_moved_sources_may_have_other_paths(change: dict[str, Any], is_allowed: bool):
    source = {"name": "web", "path": "web.txt", "eval_path": ["a", "b"], "weight": 1.0}
    before = ({"name": "wiki", "path": "wiki.txt", "weight": 1.0}, source)
    changed = {"data.sources": (before, (before[0], source | change))}
    with (
        nullcontext()
        if is_allowed
        else pytest.raises(PrepError, match=r"another recipe - data\.sources: ")
    ):
        check_changed_keys(changed)


def test_sources_instead_of_a_path_are_another_recipe():
    changed = {"data.sources": (None, ({"name": "wiki", "path": "wiki.txt"},))}
    with pytest.raises(PrepError, match=r"data\.sources: not set -> "):
        check_changed_keys(changed)
