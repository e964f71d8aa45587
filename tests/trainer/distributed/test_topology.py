"""Devices that JAX only describes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest

from prepcli.core.errors import FAILED, PrepError
from trainer.distributed import devices
from trainer.distributed.devices import tpu_devices


def test_version_of_libtpu_without_a_package_is_unknown(monkeypatch: pytest.MonkeyPatch):
    def find_version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(devices, "version", find_version)
    assert devices.libtpu_version() == "unknown"


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_topology_without_libtpu_is_reported():
    with pytest.raises(
        PrepError, match=r"no compiler for the TPU topology 'v5e:2x2' - libtpu .*prepcli\[tpu\]"
    ) as caught:
        tpu_devices("v5e:2x2")
    assert caught.value.code == FAILED
