"""The digest that identifies a model is the same for every format of it, and another one for other values."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from prepcli.restore.digest_checks import sample_digest
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA, make_checkpoint

CONFIGS = {"gpt2": GPT2, "gpt-neo": GPT_NEO, "llama": LLAMA, **FAMILY_CONFIGS}


def digest_of(name: str) -> str:
    return sample_digest(open_source(locate(name)))


# A family of each kind of rows: transposed, split, tied, fused experts, and two stacks. The check `coverage` of
# tests/prepcli/commands/testing/test_checks.py covers the rows of all families.
FAST_FAMILIES = ("gpt2", "gpt-neo", "mixtral", "opt", "t5")


@pytest.mark.parametrize("family", slow_except(sorted(CONFIGS), FAST_FAMILIES))
def test_sample_digest_is_equal_in_all_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("hf"), CONFIGS[family])
    assert (
        main(["save-init", "hf", "--pad-vocab", "8", "--mesh", "1,2,1", "--out", "init", "-q"])
        == OK
    )
    assert main(["pad-vocab", "hf", "--multiple", "64", "--out", "padded", "-q"]) == OK
    assert {digest_of(name) for name in ("init", "padded")} == {digest_of("hf")}


def test_sample_digest_differs_for_other_values(tmp_path: Path):
    make_checkpoint(tmp_path / "hf", LLAMA)
    before = digest_of(str(tmp_path / "hf"))
    path = next((tmp_path / "hf").glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name][3] += 1
    save_file(tensors, path)
    assert digest_of(str(tmp_path / "hf")) != before
