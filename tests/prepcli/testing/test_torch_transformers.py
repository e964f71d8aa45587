"""`exact_log`: logarithms of torch that do not depend on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prepcli.testing.torch_transformers import exact_log
from tests.helpers.lazy_modules import lazy_module

torch = lazy_module("torch")


def test_exact_log_rounds_the_exact_logarithm():
    values = np.arange(1, 5000, dtype=np.float32) / np.float32(7)
    with exact_log():
        logs = torch.log(torch.tensor(values))
    assert logs.dtype == torch.float32
    np.testing.assert_array_equal(
        logs.numpy(), np.array([math.log(value) for value in values], np.float32)
    )


def test_exact_log_restores_torch_log_after_an_error():
    native_log = torch.log
    with pytest.raises(TypeError), exact_log():
        torch.log(torch.tensor(1.0), "no such argument")
    assert torch.log is native_log
