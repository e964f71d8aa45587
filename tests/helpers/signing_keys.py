"""Pairs of keys that openssl makes, to sign locks with."""

from __future__ import annotations

import shutil
import subprocess

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs openssl")
KEYS = {
    "ed25519": ["-algorithm", "ed25519"],
    "p256": ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
    "p521": ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-521"],
}


def openssl(*words: str) -> None:
    """Run openssl. A failure is an error."""
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *words], check=True, capture_output=True)


def make_key(name: str, kind: str = "ed25519") -> None:
    """Write a private key `NAME.pem` and its public key `NAME.pub`."""
    openssl("genpkey", *KEYS[kind], "-out", f"{name}.pem")
    openssl("pkey", "-in", f"{name}.pem", "-pubout", "-out", f"{name}.pub")
