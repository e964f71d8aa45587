"""Loaders and corruptions: who notices that a checkpoint is not the one that was approved?

    python -m bench.loaders --work FOLDER [--seed 1] [--loaders "prep --lock,safetensors"]

A tiny LLaMA is written in the format of each loader and damaged in eight ways. A loader has `refused` a checkpoint if
it raises an error. It has `missed` it if it returns other values or another config without one. `same` is a corruption
without an effect on either. Needs the `parity` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import prepcli as prep
from prepcli.core.tables import format_table
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors

Tensors = dict[str, np.ndarray]
CONFIG = "config.json"
LOCK = Path("approved.lock.json")
QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
REFUSED = "refused"
MISSED = "missed"
SAME = "same"
NUM_TRAILING_BYTES = 16
BLOCK_NBYTES = 256


@dataclass(frozen=True)
class Loader:
    """A library that loads checkpoints.

    Attributes:
        write: Writes tensors to a folder, with the library itself where it can.
        read: Returns the tensors of a folder.
        weights: Pattern of the files with tensors.
    """

    write: Callable[[Path, Tensors], None]
    read: Callable[[Path], Mapping[str, np.ndarray]]
    weights: str


def write_safetensors(folder: Path, tensors: Tensors) -> None:
    """Write two safetensors files and their index."""
    import safetensors.numpy

    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        shard = {name: tensors[name] for name in part}
        safetensors.numpy.save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_locked(folder: Path) -> Mapping[str, np.ndarray]:
    """Load with prep and the lock of the intact folder."""
    return _load_params(folder, LOCK)


def read_unlocked(folder: Path) -> Mapping[str, np.ndarray]:
    """Load with prep alone."""
    return _load_params(folder, None)


def _load_params(folder: Path, lock: Path | None) -> Mapping[str, np.ndarray]:
    params = prep.load_params(folder, dtype="keep", lock=lock)
    return {name: np.asarray(array) for name, array in params.items()}


def read_safetensors(folder: Path) -> Mapping[str, np.ndarray]:
    """Load the files that the index names."""
    import safetensors.numpy

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: Tensors = {}
    for file in sorted({*index["weight_map"].values()}):
        tensors |= safetensors.numpy.load_file(folder / file)
    return {name: tensors[name] for name in index["weight_map"]}


def read_transformers(folder: Path) -> Mapping[str, np.ndarray]:
    """Load the model class of the config."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: value.numpy() for name, value in model.state_dict().items()}


def write_orbax(folder: Path, tensors: Tensors) -> None:
    """Save a flat tree with Orbax."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / "item", tensors)


def read_orbax(folder: Path) -> Mapping[str, np.ndarray]:
    """Restore the tree with Orbax."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(folder.absolute() / "item")


def write_dcp(folder: Path, tensors: Tensors) -> None:
    """Save with torch.distributed.checkpoint."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    save(state, checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path) -> Mapping[str, np.ndarray]:
    """Load all tensors of the metadata with torch.distributed.checkpoint."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    state: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(state, storage_reader=reader, no_dist=True)
    return {name: value.numpy() for name, value in state.items()}


def write_flax(folder: Path, tensors: Tensors) -> None:
    """Write Flax msgpack."""
    from flax.serialization import msgpack_serialize

    (folder / "flax_model.msgpack").write_bytes(msgpack_serialize(tensors))


def read_flax(folder: Path) -> Mapping[str, np.ndarray]:
    """Read Flax msgpack."""
    from flax.serialization import msgpack_restore

    tensors: Any = msgpack_restore((folder / "flax_model.msgpack").read_bytes())
    return tensors


def write_gguf(folder: Path, tensors: Tensors) -> None:
    """Write a GGUF file."""
    import gguf

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(folder: Path) -> Mapping[str, np.ndarray]:
    """Read a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(folder / "model.gguf")
    return {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def write_numpy(folder: Path, tensors: Tensors) -> None:
    """Write one NumPy archive."""
    np.savez(folder / "model.npz", allow_pickle=False, **tensors)


def read_numpy(folder: Path) -> Mapping[str, np.ndarray]:
    """Read one NumPy archive."""
    with np.load(folder / "model.npz") as archive:
        return dict(archive)


LOADERS: Mapping[str, Loader] = {
    "prep --lock": Loader(write_safetensors, read_locked, "*.safetensors"),
    "prep": Loader(write_safetensors, read_unlocked, "*.safetensors"),
    "safetensors": Loader(write_safetensors, read_safetensors, "*.safetensors"),
    "transformers": Loader(write_safetensors, read_transformers, "*.safetensors"),
    "Orbax": Loader(write_orbax, read_orbax, "item/ocdbt.process_0/d/*"),
    "torch DCP": Loader(write_dcp, read_dcp, "*.distcp"),
    "flax": Loader(write_flax, read_flax, "*.msgpack"),
    "gguf": Loader(write_gguf, read_gguf, "*.gguf"),
    "numpy": Loader(write_numpy, read_numpy, "*.npz"),
}


@dataclass(frozen=True)
class Model:
    """The intact model, and an earlier version of it with other values."""

    tensors: Tensors
    earlier: Tensors
    config: Mapping[str, Any]


Corruption = Callable[[Path, Loader, Model, random.Random], None]


def write_model(folder: Path, loader: Loader, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Write a checkpoint in the format of a loader in place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    loader.write(folder, tensors)


def flip_bit(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Flip one bit of a tensor's values."""
    path, offset = _place_of(folder, loader, model.tensors[QUERY])
    _overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 1 << rng.randrange(8)]))


def cut_file(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Cut the last bytes off the file of a tensor."""
    path, _ = _place_of(folder, loader, model.tensors[QUERY])
    os.truncate(path, path.stat().st_size - NUM_TRAILING_BYTES)


def add_bytes(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Add bytes at the end of the file of a tensor."""
    path, _ = _place_of(folder, loader, model.tensors[QUERY])
    with path.open("ab") as file:
        file.write(rng.randbytes(NUM_TRAILING_BYTES))


def overlap_tensors(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Write bytes from the middle of the data before a tensor over the tensor's first bytes."""
    path, offset = _place_of(folder, loader, model.tensors[QUERY])
    start = offset // 2
    _overwrite(path, offset, path.read_bytes()[start : start + BLOCK_NBYTES])


def swap_tensors(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Swap the queries and the keys of a layer, which have one shape."""
    swapped = {**model.tensors, QUERY: model.tensors[KEY], KEY: model.tensors[QUERY]}
    write_model(folder, loader, swapped, model.config)


def use_stale_file(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Put a weight file of an earlier version of the model in place of the present one."""
    path, _ = _place_of(folder, loader, model.tensors[QUERY])
    earlier = folder.with_name(f"{folder.name}-earlier")
    write_model(earlier, loader, model.earlier, model.config)
    stale, _ = _place_of(earlier, loader, model.earlier[QUERY])
    shutil.copyfile(stale, path)


def rename_tensor(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Write a tensor under another name."""
    renamed = dict(model.tensors)
    renamed[f"{QUERY}_old"] = renamed.pop(QUERY)
    write_model(folder, loader, renamed, model.config)


def change_config(folder: Path, loader: Loader, model: Model, rng: random.Random) -> None:
    """Change a number of the config that no shape depends on."""
    config = {**model.config, "rms_norm_eps": 1e-3}
    (folder / CONFIG).write_text(json.dumps(config))


CORRUPTIONS: Mapping[str, Corruption] = {
    "bit flip": flip_bit,
    "cut": cut_file,
    "trailing": add_bytes,
    "overlap": overlap_tensors,
    "swapped": swap_tensors,
    "stale": use_stale_file,
    "renamed": rename_tensor,
    "config": change_config,
}


def _place_of(folder: Path, loader: Loader, array: np.ndarray) -> tuple[Path, int]:
    """Return the file with the bytes of a tensor, and their offset.

    Orbax compresses. The middle of its largest file stands for the tensor.
    """
    paths = sorted(folder.glob(loader.weights))
    for path in paths:
        offset = path.read_bytes().find(array.tobytes())
        if offset >= 0:
            return path, offset
    largest = max(paths, key=lambda path: path.stat().st_size)
    return largest, largest.stat().st_size // 2


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def outcome(folder: Path, loader: Loader, intact: Mapping[str, bytes]) -> str:
    """Load a checkpoint, and return REFUSED, MISSED or SAME.

    Args:
        folder: The checkpoint, perhaps damaged.
        loader: Reads it.
        intact: What `contents` returned for the intact checkpoint.
    """
    try:
        present = contents(folder, loader)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # Every library has errors of its own, and torch's CheckpointException is no Exception. Any of them tells the
        # user.
        return REFUSED
    return SAME if present == intact else MISSED


def contents(folder: Path, loader: Loader) -> dict[str, bytes]:
    """Return the bytes of the config and of the tensors that a loader returns."""
    loaded = {CONFIG: (folder / CONFIG).read_bytes()}
    for name, array in loader.read(folder).items():
        loaded[name] = np.asarray(array).tobytes()
    return loaded


def make_model() -> Model:
    """Return a tiny LLaMA with an untied head, and as many heads of keys as of queries."""
    config = {**LLAMA, "num_key_value_heads": LLAMA["num_attention_heads"]}
    tensors = checkpoint_tensors(config, "float32", False, False)
    earlier = {name: array + 1 for name, array in tensors.items()}
    return Model(tensors, earlier, config)


def run_loader(name: str, seed: int) -> list[str]:
    """Return the outcome of each corruption for a loader. Works in the current folder."""
    loader = LOADERS[name]
    model = make_model()
    folder = Path("checkpoint")
    write_model(folder, loader, model.tensors, model.config)
    if loader.read is read_locked:
        prep.lock(folder, LOCK, overwrite=True)
    intact = contents(folder, loader)
    outcomes: list[str] = []
    for corrupt in CORRUPTIONS.values():
        write_model(folder, loader, model.tensors, model.config)
        corrupt(folder, loader, model, random.Random(seed))
        outcomes.append(outcome(folder, loader, intact))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loaders", default=",".join(LOADERS))
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    os.chdir(options.work)
    rows: list[tuple[str, ...]] = []
    for name in options.loaders.split(","):
        rows.append((name, *run_loader(name, options.seed)))
    print(format_table(rows, ("loader", *CORRUPTIONS), width=None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
