"""Estimate what starting, loading, saving and feeding a run cost on many hosts, from measured and assumed rates.

    python -m bench.many_hosts
    python -m bench.many_hosts --model llama-13b --hosts 256,4096 --devices-per-host 4 --store-gb-s 1

The rates of the coordination service are measured on this machine, with a real service and a real client of JAX. The
rates of storage are assumptions, given as options. Everything else is counted from shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prepcli.models.mesh import parse_mesh
from prepcli.models.presets import PRESETS
from prepcli.models.rules import DEFAULT_RULES
from trainer.distributed.watchdog import WatchSettings
from trainer.planning.model_shapes import model_of_config

GB = 10**9
STATE_COPIES = 3  # parameters and two moments, float32
HEARTBEAT_NBYTES = 150
HEARTBEAT_TIMEOUT_S = 60.0
CHUNK_ENTRY_NBYTES = 60  # entry of a chunk in the OCDBT index, before compression
NUM_CALLS = 4000


@dataclass(frozen=True)
class Rates:
    """Rates of the coordination service, in calls per second, and the seconds to read all heartbeats of 4,096."""

    writes: float
    reads: float
    read_all_s: float


def main() -> None:
    """Measure the coordination service and print the estimates."""
    options = parse_options()
    if options.measure_port:
        print(json.dumps(vars(measure_service(options.measure_port))))
        return
    rates = measure_in_process()
    print(
        f"coordination service, one client: {rates.writes:,.0f} writes/s, {rates.reads:,.0f} reads/s;"
    )
    print(f"4,096 heartbeats read in {rates.read_all_s * 1000:.0f} ms")
    for num_hosts in map(int, options.hosts.split(",")):
        print()
        for name, value in estimate(options, rates, num_hosts):
            print(f"{name:<58}{value:>20}")


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-7b", choices=sorted(PRESETS))
    parser.add_argument("--hosts", default="256,4096")
    parser.add_argument("--devices-per-host", type=int, default=4)
    parser.add_argument(
        "--replica-devices",
        type=int,
        default=256,
        help="devices that one copy of the state is split over",
    )
    parser.add_argument("--store-gb-s", type=float, default=1.0, help="storage rate of one host")
    parser.add_argument(
        "--total-gb-s", type=float, default=100.0, help="storage rate of all hosts together"
    )
    parser.add_argument("--tokens", type=float, default=1e12, help="tokens of the training data")
    parser.add_argument("--measure-port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def estimate(
    options: argparse.Namespace, rates: Rates, num_hosts: int
) -> Iterator[tuple[str, str]]:
    """Yield names and values of the costs of a run on a number of hosts."""
    num_devices = num_hosts * options.devices_per_host
    split = min(options.replica_devices, num_devices)
    shapes = model_of_config(PRESETS[options.model]).shapes(
        parse_mesh(f"1,{split},1"), DEFAULT_RULES
    )
    leaves = list(shapes.leaves.values())
    param_nbytes = 4 * sum(math.prod(leaf.shape) for leaf in leaves)
    state_nbytes = STATE_COPIES * param_nbytes
    owners = -(-split // options.devices_per_host)
    num_chunks = (
        STATE_COPIES
        * split
        * sum(leaf.shape[0] if leaf.path.startswith("layers.") else 1 for leaf in leaves)
    )
    yield (
        f"{num_hosts:,} hosts, {num_devices:,} devices, {options.model}, state over",
        f"{split:,} devices",
    )
    yield "start: processes that connect and are compared", f"{3 * num_hosts / rates.writes:.1f} s"
    interval_s = WatchSettings(HEARTBEAT_TIMEOUT_S, 0.0, {}).interval_s(num_hosts)
    # Each process writes its heartbeat and reads the decision of process 0.
    calls_per_s = 2 * num_hosts / interval_s
    yield f"heartbeats: calls at process 0, every {interval_s:.0f} s", f"{calls_per_s:,.0f}/s"
    yield "  share of what the service answers here", f"{calls_per_s / rates.writes:.0%}"
    yield "load: bytes from storage, each once", f"{param_nbytes / GB:,.1f} GB"
    yield "  seconds", f"{storage_s(options, param_nbytes, num_hosts):.1f} s"
    yield (
        "  if every replica read its own copy",
        f"{num_devices // split * param_nbytes / GB:,.0f} GB",
    )
    yield "save: bytes, of one copy of the state", f"{state_nbytes / GB:,.1f} GB"
    yield "  hosts that write", f"{owners:,}"
    yield "  seconds to write", f"{storage_s(options, state_nbytes, owners):.1f} s"
    yield (
        "  seconds to read back for digests",
        f"{storage_s(options, state_nbytes, num_hosts):.1f} s",
    )
    yield "  chunks", f"{num_chunks:,}"
    yield "  index of chunks, by process 0", f"{num_chunks * CHUNK_ENTRY_NBYTES / 1e6:,.0f} MB"
    tokens_nbytes = 4 * options.tokens
    yield (
        "data: check of the digests by process 0",
        f"{tokens_nbytes / GB / options.store_gb_s:,.0f} s",
    )
    yield "  divided among the hosts", f"{storage_s(options, tokens_nbytes, num_hosts):,.0f} s"


def storage_s(options: argparse.Namespace, nbytes: float, num_hosts: int) -> float:
    """Return the seconds needed by a number of hosts for bytes of storage, divided equally."""
    return nbytes / GB / min(options.total_gb_s, options.store_gb_s * num_hosts)


def measure_in_process() -> Rates:
    """Measure the coordination service in a process of its own, since JAX aborts the process when the service ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "bench.many_hosts", "--measure-port", str(port)]
    return Rates(
        **json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )


def measure_service(port: int) -> Rates:
    """Measure writes, reads, and a read of 4,096 values."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    service = _jax.get_distributed_runtime_service(f"[::]:{port}", 1)
    client = _jax.get_distributed_runtime_client(f"127.0.0.1:{port}", 0)
    client.connect()
    text = "x" * HEARTBEAT_NBYTES
    write_s = seconds_of(lambda i: client.key_value_set(f"h/{i % 4096}", text, True), 4096)
    read_s = seconds_of(lambda i: client.key_value_try_get("h/1"), NUM_CALLS)
    all_s = seconds_of(lambda i: client.key_value_dir_get("h/"), 1)
    client.shutdown()
    service.shutdown()
    return Rates(4096 / write_s, NUM_CALLS / read_s, all_s)


def seconds_of(call: Callable[[int], object], count: int) -> float:
    """Return the seconds of a number of calls."""
    start_s = time.perf_counter()
    for i in range(count):
        call(i)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
