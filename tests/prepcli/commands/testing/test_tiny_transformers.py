"""Random tensors of tiny models."""

from __future__ import annotations

import numpy as np

from prepcli.commands.testing.tiny_transformers import random_tensors
from tests.helpers.later_configs import LATER_FAMILIES


def test_random_factors_of_the_residual_stream_are_around_one():
    # Factors around 0 would leave a residual stream of rounding errors.
    tensors = random_tensors(LATER_FAMILIES["doge"])
    factors = [tensor for name, tensor in tensors.items() if name.endswith("_residual")]
    assert len(factors) == 4
    for values in factors:
        assert abs(values.mean() - 1) < 0.2
        assert 0.1 < np.std(values) < 0.3
