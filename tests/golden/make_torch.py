"""Script that writes torch/* beside this file: checkpoints in all formats of torch.save, and the bytes of each tensor.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_torch`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from tests.helpers.torch_checkpoints import tensor_bytes

FOLDER = Path(__file__).parent / "torch"
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip


def every_dtype() -> dict[str, Any]:
    """Return a tensor of each dtype."""
    import torch

    return {name: torch.arange(15).reshape(3, 5).to(getattr(torch, name)) for name in DTYPES}


def views() -> dict[str, Any]:
    """Return tensors that share one storage, an empty tensor and a scalar."""
    import torch

    big = torch.arange(48.0).reshape(6, 8)
    return OrderedDict(
        big=big, alias=big, transposed=big.t(), inside=big[1:4, 2:7], row=big[2], every_other=big[:, ::2],
        scalar=torch.tensor(3.5), empty=torch.empty(0, 4), parameter=torch.nn.Parameter(big[3:].clone()),
        one=big[:, :1], swapped=torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
    )  # fmt: skip


def wrapped() -> dict[str, Any]:
    """Return a checkpoint of a trainer: a model beside an optimizer state and other values."""
    import torch

    state = torch.nn.Linear(3, 2).state_dict()
    moments = {0: {"step": 3, "exp_avg": torch.ones(2, 3)}}
    return {
        "epoch": 3, "lr": 0.5, "state_dict": state, "optimizer": {"state": moments, "param_groups": [{"lr": 0.5}]},
        "dtype": torch.float32, "device": torch.device("cpu"), "note": "x", "size": torch.Size([2, 3]), "seen": {1, 2},
    }  # fmt: skip


def main() -> None:
    """Write the checkpoints and tensors.json."""
    import torch

    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    described: dict[str, Any] = {}
    for name, checkpoint in (("dtypes", every_dtype()), ("views", views()), ("wrapped", wrapped())):
        for kind, options in (
            ("zip", {}),
            ("plain", {"_disable_byteorder_record": True, "pickle_protocol": 4}),
            ("legacy", {"_use_new_zipfile_serialization": False}),
        ):
            # prep refuses files before PyTorch 1.6.
            if kind != "legacy" or name == "views":
                torch.save(checkpoint, FOLDER / f"{name}-{kind}.bin", **options)
        state = checkpoint.get("state_dict", checkpoint)
        described[name] = {
            key: {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "bits": tensor_bytes(value).hex(),
            }
            for key, value in state.items()
        }
    (FOLDER / "tensors.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
