"""Flipped bits in an output or a source: the error names the tensor, and no damaged value is written."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.faults import COMMANDS
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except

pytestmark = pytest.mark.usefixtures("sources")


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << (offset % 8)
    path.write_bytes(data)


def tensor_byte_ranges(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name and byte range of every tensor of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            yield name, 8 + size + low, 8 + size + high


def test_verify_names_the_tensor_of_a_flipped_bit(capsys):
    run_ok(*COMMANDS["pad-vocab"], "--out", "whole")
    draw = random.Random(2)
    places = [
        (p, *t)
        for p in sorted(Path("whole").glob("*.safetensors"))
        for t in tensor_byte_ranges(p)
        if t[1] < t[2]
    ]
    for path, name, low, high in draw.sample(places, 12):
        capsys.readouterr()
        before = path.read_bytes()
        flip_bit(path, draw.randrange(low, high))
        assert main(["verify", "whole", "-q"]) == 1
        err = capsys.readouterr().err
        assert "whole is damaged (1 of " in err
        assert f"({name}) rows " in err
        path.write_bytes(before)
    assert main(["verify", "whole", "-q"]) == 0


@pytest.mark.parametrize("name", slow_except(["reshard", "export"], ["export"]))
def test_flipped_bit_in_source_stops_conversion(capsys, name: str):
    run_ok(*COMMANDS[name], "--out", "whole")
    draw = random.Random(3)
    for path in sorted(Path("init/d").iterdir()):
        before = path.read_bytes()
        for offset in (draw.randrange(len(before)) for _ in range(6)):
            flip_bit(path, offset)
            capsys.readouterr()
            code = main([*COMMANDS[name], "--out", "out", "-q", "--restart"])
            if code == 0:  # the bit is between chunks, outside all tensors
                assert main(["verify", "out", "whole", "-q"]) == 0
                shutil.rmtree("out")
            else:
                pattern = r"error: ((transformer|lm_head)\.\S+ in init|init/d/\w+) is damaged"
                assert re.search(pattern, capsys.readouterr().err)
                assert not Path("out").exists()
            path.write_bytes(before)
