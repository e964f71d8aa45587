"""Search of meshes."""

from __future__ import annotations

from pathlib import Path

from prepcli.models.presets import PRESETS
from prepcli.models.rules import ACTIVATION_RULES, DEFAULT_RULES
from tests.helpers.training_plans import TINY, load_text
from trainer.planning.model_shapes import model_of_config
from trainer.planning.step_time import ACCELERATORS
from trainer.planning.training_plan import search_meshes


def test_search_returns_fitting_meshes_by_time(tmp_path: Path):
    recipe = load_text(tmp_path, "data.seq_length=2048", "model.dtype=bfloat16")
    search = search_meshes(
        recipe,
        model_of_config(PRESETS["llama-7b"]),
        DEFAULT_RULES,
        kind=ACCELERATORS["H100"],
        num_devices=8,
    )
    times = [option.estimate.time.step_s for option in search.options]
    assert times == sorted(times)
    assert search.num_too_large > 0, "one device cannot hold the state"
    assert all(
        option.plan.mesh.n_devices == 8 and option.estimate.fits for option in search.options
    )
    assert "8,1,1" not in [str(option.plan.mesh) for option in search.options]


def test_search_covers_every_mesh_once(tmp_path: Path):
    search = search_meshes(
        load_text(tmp_path),
        model_of_config(TINY),
        DEFAULT_RULES,
        kind=ACCELERATORS["v5e"],
        num_devices=12,
    )
    meshes = [str(option.plan.mesh) for option in search.options]
    assert len(meshes) == len(set(meshes))
    num_axes = 3 + any("sp" in choice for choice in ACTIVATION_RULES["seq"])
    num_meshes = {3: 18, 4: 40}[num_axes]  # 12 = 2 * 2 * 3
    assert len(meshes) + search.num_too_large + search.refusals.total() == num_meshes


def test_search_counts_reasons_of_refusal(tmp_path: Path):
    search = search_meshes(
        load_text(tmp_path),
        model_of_config(TINY),
        DEFAULT_RULES,
        kind=ACCELERATORS["v5e"],
        num_devices=8,
    )
    assert search.refusals["heads 4 cannot be split over mp 8"] == 1
    assert {str(option.plan.mesh) for option in search.options} >= {
        "8,1,1",
        "1,8,1",
        "1,2,4",
        "2,2,2",
    }
