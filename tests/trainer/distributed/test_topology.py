"""Tests of devices that JAX only describes, and of the process that compiles for them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from trainer.distributed.topology import run_compile_process, tpu_devices
from trainer.models.errors import FAILED, PrepError


def test_failed_process_is_reported_with_its_last_line():
    with pytest.raises(PrepError, match=r"the compilation failed - exit code 1: .*No module named 'nowhere'"):
        run_compile_process("nowhere.at_all", "{}", 1)


def test_process_without_an_answer_is_reported():
    with pytest.raises(PrepError, match="the compilation failed - exit code 0: no message"):
        run_compile_process("keyword", "{}", 1)


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_topology_without_libtpu_is_reported():
    with pytest.raises(
        PrepError, match=r"no compiler for the TPU topology 'v5e:2x2' - libtpu .*prepcli\[tpu\]"
    ) as caught:
        tpu_devices("v5e:2x2")
    assert caught.value.code == FAILED
