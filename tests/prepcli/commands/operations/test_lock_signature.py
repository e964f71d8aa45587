"""`prep lock --sign` signs a lock file, and `--public-key` refuses every other lock. openssl is the judge."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.core.errors import DamagedError, OutputExistsError, PrepError, UsageError
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.signing_keys import KEYS, make_key, needs_openssl, openssl
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

pytest.importorskip("cryptography")
pytestmark = needs_openssl
LOCK = Path("m.lock.json")
SIGNATURE = Path("m.lock.json.sig")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model `m` and a pair of keys `k` to the working folder."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA)
    make_key("k")
    return Path("m")


@pytest.mark.parametrize("kind", KEYS)
def test_openssl_accepts_the_signature(model: Path, kind: str):
    make_key("k", kind)
    assert prep.lock(model, sign="k.pem").signature == SIGNATURE
    if kind == "ed25519":
        files = ["-in", str(LOCK), "-sigfile", str(SIGNATURE)]
        openssl("pkeyutl", "-verify", "-pubin", "-inkey", "k.pub", "-rawin", *files)
    else:
        openssl("dgst", "-sha256", "-verify", "k.pub", "-signature", str(SIGNATURE), str(LOCK))
    assert prep.verify(model, lock=LOCK, public_key="k.pub")


def test_signature_of_openssl_is_accepted(model: Path):
    make_key("k", "p256")
    prep.lock(model)
    openssl("dgst", "-sha256", "-sign", "k.pem", "-out", str(SIGNATURE), str(LOCK))
    assert prep.save_init(model, lock=LOCK, public_key="k.pub")


def test_lock_without_signature_is_refused(model: Path):
    prep.lock(model)
    with pytest.raises(DamagedError, match=r"m\.lock\.json is not signed"):
        prep.save_init(model, lock=LOCK, public_key="k.pub")
    assert not Path("m-init").exists()


def test_changed_lock_and_signature_are_refused(model: Path):
    prep.lock(model, sign="k.pem")
    for path in (LOCK, SIGNATURE):
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(DamagedError, match="has a wrong signature"):
            prep.verify(model, lock=LOCK, public_key="k.pub")
        path.write_bytes(before)
    assert prep.verify(model, lock=LOCK, public_key="k.pub")


def test_signature_of_another_key_is_refused(model: Path):
    make_key("other")
    prep.lock(model, sign="other.pem")
    with pytest.raises(DamagedError, match="has a wrong signature"):
        prep.verify(model, lock=LOCK, public_key="k.pub")


@pytest.mark.parametrize("kind", ["ed25519", "p256"])
def test_signature_by_another_key_needs_overwrite(model: Path, kind: str):
    make_key("first", kind)
    make_key("second", kind)
    prep.lock(model, sign="first.pem")
    before = SIGNATURE.read_bytes()
    prep.lock(model, sign="first.pem")
    with pytest.raises(OutputExistsError, match=r"m\.lock\.json\.sig already exists"):
        prep.lock(model, sign="second.pem")
    assert SIGNATURE.read_bytes() == before
    prep.lock(model, sign="second.pem", overwrite=True)
    assert prep.verify(model, lock=LOCK, public_key="second.pub")


def test_folder_in_place_of_the_lock_is_refused(model: Path):
    LOCK.mkdir()
    with pytest.raises(PrepError, match=r"m\.lock\.json is not a file"):
        prep.lock(model, overwrite=True)


def test_new_lock_removes_the_old_signature(model: Path):
    prep.lock(model, sign="k.pem")
    Path("m/generation_config.json").write_text("{}")
    prep.lock(model, overwrite=True)
    assert not SIGNATURE.exists()
    with pytest.raises(DamagedError, match="is not signed"):
        prep.verify(model, lock=LOCK, public_key="k.pub")


def test_chain_checks_the_signature(model: Path):
    prep.lock(model, sign="k.pem")
    prep.save_init(model)
    assert prep.verify_chain("m-init", lock=LOCK, public_key="k.pub")
    SIGNATURE.unlink()
    with pytest.raises(DamagedError, match="is not signed"):
        prep.verify_chain("m-init", lock=LOCK, public_key="k.pub")


def test_command_signs_and_checks(model: Path, capsys: pytest.CaptureFixture[str]):
    assert run_json(capsys, "lock", "m", "--sign", "k.pem")["signature"] == str(SIGNATURE)
    run_ok("save-init", "m", "--lock", str(LOCK), "--public-key", "k.pub")
    SIGNATURE.write_bytes(b"")
    words = ["verify", "m", "--lock", str(LOCK), "--public-key", "k.pub"]
    assert "has a wrong signature" in run_failing(capsys, 1, *words)


@pytest.mark.parametrize("content", ["", "no key", "rsa", "public", "password"])
def test_unusable_private_keys_are_refused_before_reading(model: Path, content: str):
    path = Path("bad.pem")
    path.write_text(content)
    if content == "rsa":
        openssl("genpkey", "-algorithm", "RSA", "-out", "bad.pem")
    elif content == "public":
        shutil.copy("k.pub", path)
    elif content == "password":
        openssl("pkey", "-in", "k.pem", "-aes256", "-passout", "pass:x", "-out", "bad.pem")
    with pytest.raises(UsageError, match=r"^bad\.pem "):
        prep.lock(model, sign=path)
    assert not LOCK.exists()


def test_private_key_is_no_public_key(model: Path):
    prep.lock(model, sign="k.pem")
    with pytest.raises(UsageError, match="is not a public key"):
        prep.verify(model, lock=LOCK, public_key="k.pem")


def test_public_key_without_lock_has_no_effect(model: Path):
    with pytest.raises(UsageError, match="`public_key` has no effect without `lock`"):
        prep.save_init(model, public_key="k.pub")


def test_missing_extra_is_named(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(PrepError, match="cannot be signed or checked") as caught:
        prep.lock(model, sign="k.pem")
    assert "prepcli[signing]" in caught.value.hint
