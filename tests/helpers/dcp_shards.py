"""Save a torch distributed checkpoint with several processes, each with a part of the rows of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np


def save_sharded(folder: Path, state: Mapping[str, np.ndarray], ranks: int) -> None:
    """Save tensors as FSDP stores them: dim 0 is split between the ranks, and the last one may have fewer rows."""
    from torch.multiprocessing.spawn import spawn

    spawn(_save_rank, (str(folder.absolute()), dict(state), ranks), nprocs=ranks)


def _save_rank(rank: int, folder: str, state: dict[str, np.ndarray], ranks: int) -> None:
    """Save the part of one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=ranks
    )
    mesh = DeviceMesh("cpu", list(range(ranks)))
    tensors = {}
    for name, value in state.items():
        tensors[name] = distribute_tensor(torch.from_numpy(value), mesh, [Shard(0)])
    save(tensors, checkpoint_id=folder)
    dist.destroy_process_group()
