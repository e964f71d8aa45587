"""Script that writes torch_dcp/ beside this file: a checkpoint that two ranks save with torch.distributed.checkpoint.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_dcp`. `VALUES` has the tensors.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "torch_dcp"
WORLD_SIZE = 2
# Name -> values. The dtype of `model.v` is bfloat16.
VALUES = {
    "model.w": np.arange(42, dtype=np.float32).reshape(7, 6),
    "model.v": np.arange(40, dtype=np.float32).reshape(4, 10),
    "model.layers.0.t": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "model.layers.1.t": -np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "model.ids": np.arange(5, dtype=np.int64) << 40,
    "model.scalar": np.array(2.5, np.float32),
    "model.none": np.zeros((0, 3), np.float32),
}


def save(rank: int) -> None:
    """Save the part of one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    mesh = DeviceMesh("cpu", list(range(WORLD_SIZE)))
    # `from_numpy` keeps the strides of the transposed tensors.
    tensors = {name.removeprefix("model."): torch.from_numpy(v) for name, v in VALUES.items()}
    tensors["w"] = distribute_tensor(tensors["w"], mesh, [Shard(0)])
    tensors["v"] = distribute_tensor(tensors["v"].bfloat16(), mesh, [Shard(1)])
    save_checkpoint({"model": tensors, "step": 7}, checkpoint_id=FOLDER)
    dist.destroy_process_group()


if __name__ == "__main__":
    from torch.multiprocessing.spawn import spawn

    shutil.rmtree(FOLDER, ignore_errors=True)
    spawn(save, nprocs=WORLD_SIZE)
