"""The signature of a lock file: `FILE.sig`, a detached signature by an Ed25519 or ECDSA key.

The file has the bytes of the signature alone. openssl checks it too:

    openssl pkeyutl -verify -pubin -inkey PUB.pem -rawin -in FILE -sigfile FILE.sig     (Ed25519)
    openssl dgst -sha256 -verify PUB.pem -signature FILE.sig FILE                       (ECDSA, in DER)
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import Command, DamagedError, Option, PrepError, text, usage_error
from prepcli.formats.untrusted import read_small_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey
    PublicKey = Ed25519PublicKey | EllipticCurvePublicKey

SIGNATURE_SUFFIX = ".sig"
# A signature by a key of 521 bits has 139 bytes, and a key in PEM less than 1 KiB.
MAX_SIGNATURE_NBYTES = 4096
MAX_KEY_NBYTES = 64 << 10


def signature_path(lock: Path) -> Path:
    """Return the path of the signature of a lock file."""
    return lock.with_name(lock.name + SIGNATURE_SUFFIX)


def sign(data: bytes, key_path: Path) -> bytes:
    """Return the signature of the bytes of a lock file.

    Args:
        data: Bytes of the lock file.
        key_path: Private key in PEM, without a password.

    Raises:
        UsageError: The file has no such key.
        PrepError: The extra `signing` is not installed.
    """
    key = _read_private_key(key_path)
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, Ed25519PrivateKey):
        return key.sign(data)
    return key.sign(data, ECDSA(SHA256()))


def check_signature(lock: Path, data: bytes, key_path: Path) -> None:
    """Check the signature next to a lock file.

    Args:
        lock: Path of the lock file.
        data: Its bytes.
        key_path: Public key in PEM.

    Raises:
        UsageError: `key_path` has no public key.
        DamagedError: The signature is missing, or the key did not make it for these bytes.
        PrepError: The extra `signing` is not installed.
    """
    key = _read_public_key(key_path)
    path = signature_path(lock)
    hint = text("{} signs it", Command("lock", "MODEL", Option("sign", "KEY")))
    if not path.is_file():
        raise DamagedError(f"{lock} is not signed", f"{path} does not exist", hint)
    if not _is_valid(read_small_file(path, MAX_SIGNATURE_NBYTES), data, key):
        why = f"{key_path} did not sign these bytes, or {path} was changed"
        hint = "get the lock and its signature again, or name the key of their author"
        raise DamagedError(f"{lock} has a wrong signature", why, hint)


def is_signed_with(signature: Path, data: bytes, key_path: Path) -> bool:
    """Return whether a file is a signature of the bytes by a private key.

    Signatures by ECDSA keys are random, so the bytes of two signatures cannot be compared.

    Raises:
        UsageError: `key_path` has no private key.
        PrepError: The signature cannot be read, or the extra `signing` is not installed.
    """
    key = _read_private_key(key_path).public_key()
    return _is_valid(read_small_file(signature, MAX_SIGNATURE_NBYTES), data, key)


def _is_valid(signature: bytes, data: bytes, key: PublicKey) -> bool:
    """Return whether a key made a signature for these bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, data)
        else:
            key.verify(signature, data, ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def _read_private_key(path: Path) -> PrivateKey:
    data = _read_key(path)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except TypeError as error:
        hint = f"`openssl pkey -in {path} -out KEY.pem` removes the password"
        raise usage_error(f"{path} has a password", "it is not asked for", hint) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _key_error(path, "private") from error
    if not isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey):
        raise _key_error(path, "private")
    return key


def _read_public_key(path: Path) -> PublicKey:
    data = _read_key(path)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _key_error(path, "public") from error
    if not isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
        raise _key_error(path, "public")
    return key


def _read_key(path: Path) -> bytes:
    """Read the file of a key. Raise PrepError without the extra, or if the file cannot be read."""
    if find_spec("cryptography") is None:
        why = "cryptography is not installed"
        raise PrepError(
            "locks cannot be signed or checked", why, "`pip install 'prepcli[signing]'`"
        )
    return read_small_file(path, MAX_KEY_NBYTES)


def _key_error(path: Path, kind: str) -> PrepError:
    why = f"a {kind} Ed25519 or ECDSA key in PEM is expected"
    hint = "`openssl genpkey -algorithm ed25519 -out KEY.pem` makes a private key"
    if kind == "public":
        hint = "`openssl pkey -in KEY.pem -pubout -out PUB.pem` makes the public key"
    return usage_error(f"{path} is not a {kind} key for signatures", why, hint)
