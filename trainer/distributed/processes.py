"""The start of JAX in several processes, and their exchange of texts. The first computation fixes the devices."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from prepcli.core.compilation_cache import is_default_folder
from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.launchers import TPU_HOST_VARIABLES
from prepcli.core.process_address import ProcessAddress, is_loopback, split_host_port
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.core.worker_thread import exit_now
from trainer.distributed.devices import (
    backends_are_initialized,
    distributed_state,
    local_devices,
    runs_on_tpu_vm,
)
from trainer.distributed.rendezvous import meet_processes, process_place

# Fatal errors of JAX's coordination service, reported to Python before they abort the process.
#
# A thread of the runtime learns that process 0 is gone, or that the service lost a process, and aborts this process
# with its own log. `jax.distributed.initialize` has no hook for it. jaxlib's client has one,
# `missed_heartbeat_callback`, but jaxlib 0.10 cannot convert the callback's argument: it throws `std::bad_cast`,
# which terminates the process. Therefore both the callback and the terminate handler of the C++ runtime call
# `RuntimeErrors`. Without the hook, JAX aborts the process.

CLIENT_FACTORY = "get_distributed_runtime_client"
CALLBACK = "missed_heartbeat_callback"
# The mangled name of std::set_terminate(void (*)()) in libstdc++.
SET_TERMINATE = "_ZSt13set_terminatePFvvE"
# The watchdog ends the process within this time, or JAX aborts it.
DECISION_S = 30.0


class RuntimeErrors:
    """Fatal errors of the runtime of this process.

    Attributes:
        reported: Set after a fatal error. The thread that reports it waits meanwhile.
    """

    def __init__(self) -> None:
        self.reported = threading.Event()
        self._previous_handler: int | None = None
        # ctypes frees the C function with this object, so it must live as long as the process.
        self._handler = ctypes.CFUNCTYPE(None)(self._on_terminate)

    @contextmanager
    def intercept_client_errors(self) -> Iterator[None]:
        """Report fatal errors of the distributed clients that JAX creates inside the context.

        The errors are reported as long as the client exists, also after the context.
        """
        factory: Callable[..., Any] | None = getattr(_jax, CLIENT_FACTORY, None)
        # The docstring of a C++ function has its signature. A jaxlib without the option gets no
        # hook.
        if factory is None or CALLBACK not in (factory.__doc__ or ""):
            yield
            return
        # With another C++ library there is no hook, and JAX aborts the process.
        with suppress(OSError, AttributeError):
            set_terminate = getattr(ctypes.CDLL("libstdc++.so.6"), SET_TERMINATE)
            set_terminate.restype = ctypes.c_void_p
            self._previous_handler = set_terminate(self._handler)
        setattr(_jax, CLIENT_FACTORY, self._add_error_callback(factory))
        try:
            yield
        finally:
            setattr(_jax, CLIENT_FACTORY, factory)

    def _add_error_callback(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Make each client of the factory report its errors to this object."""

        def create_client(*args: Any, **options: Any) -> Any:
            return factory(
                *args, **{**options, CALLBACK: self._on_error, "shutdown_on_destruction": False}
            )

        return create_client

    def _on_error(self, *_: object) -> None:
        """Report the error, and wait for the decision of the watchdog."""
        self.reported.set()
        # JAX aborts the process when this returns. Until then the watchdog can end it with a
        # message.
        time.sleep(DECISION_S)

    def _on_terminate(self) -> None:
        """Report the error. If nothing ends the process, end it as the previous handler does."""
        self._on_error()
        if self._previous_handler:
            ctypes.CFUNCTYPE(None)(self._previous_handler)()


# The coordination service of `jax.distributed` as a ProcessGroup.
#
# The client is private in JAX. This module uses its methods in jaxlib 0.10.

KEY_PREFIX = "prep"
# A day is longer than any wait for a live process. The watchdog ends waits for lost ones.
WAIT_MS = 24 * 60 * 60 * 1000


class ConnectionBrokenError(PrepError):
    """The coordination service does not answer, or reports a lost process."""


class CoordinatedProcesses:
    """ProcessGroup of the processes that `jax.distributed.initialize` connected.

    Attributes:
        index: Index of this process.
        count: Number of processes.
        errors: Fatal errors of the runtime.
        is_owner: Whether prep connected the processes. False if the calling program did.
        places: Host and process id of this process and of other known ones, by index.
    """

    def __init__(
        self, errors: RuntimeErrors | None = None, places: Mapping[int, str] | None = None
    ) -> None:
        self.errors = errors or RuntimeErrors()
        self.is_owner = errors is not None
        state: Any = distributed_state()
        self.index: int = state.process_id
        self.count: int = state.num_processes
        self.places: Mapping[int, str] = {**(places or {}), self.index: process_place()}
        self._client = state.client
        # The prefix must be equal on all processes, so each process counts its own groups under its
        # own key.
        start = self._client.key_value_increment(f"{KEY_PREFIX}/starts/{self.index}", 1)
        # Keys of an earlier group of the same processes must not answer for this one.
        self._prefix = f"{KEY_PREFIX}/{start}"
        self._calls: Counter[str] = Counter()

    def barrier(self, name: str) -> None:
        """Wait until all processes have called it. Raise PrepError if one of them is lost."""
        key = self._next_key("barrier", name)
        with _convert_jax_errors(name):
            self._client.wait_at_barrier(key, WAIT_MS)

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes by index on process 0, and an empty list elsewhere."""
        key = self._next_key("gather", name)
        with _convert_jax_errors(name):
            self._client.key_value_set(f"{key}/{self.index}", text)
            if self.index:
                return []
            texts = [
                self._client.blocking_key_value_get(f"{key}/{index}", WAIT_MS)
                for index in range(self.count)
            ]
            # The service keeps all keys in the memory of process 0 until they are deleted.
            self._client.key_value_delete(f"{key}/")
            return texts

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of process 0 on all processes."""
        key = self._next_key("broadcast", name)
        with _convert_jax_errors(name):
            if self.index == 0:
                self._client.key_value_set(key, text)
                return text
            return self._client.blocking_key_value_get(key, WAIT_MS)

    def publish(self, key: str, text: str) -> None:
        """Store a text for all processes, in place of an earlier one.

        Raises:
            ConnectionBrokenError: Process 0 does not answer.
        """
        with _convert_jax_errors(key):
            self._client.key_value_set(f"{self._prefix}/{key}", text, allow_overwrite=True)

    def read(self, key: str) -> str | None:
        """Return the published text of a key. None if there is none.

        Raises:
            ConnectionBrokenError: Process 0 does not answer.
        """
        with _convert_jax_errors(key):
            try:
                return self._client.key_value_try_get(f"{self._prefix}/{key}")
            except jax.errors.JaxRuntimeError as error:
                # jaxlib raises one exception type for all status codes. The code is in the message.
                if "NOT_FOUND" in str(error):
                    return None
                raise

    def read_by_index(self, key: str) -> dict[int, str]:
        """Return the texts that processes published as `KEY/INDEX`, by index.

        Raises:
            ConnectionBrokenError: Process 0 does not answer.
        """
        with _convert_jax_errors(key):
            texts: list[tuple[str, str]] = self._client.key_value_dir_get(f"{self._prefix}/{key}/")
        return {int(name.rpartition("/")[2]): text for name, text in texts}

    def disconnect(self) -> None:
        """Disconnect together with the other processes, and wait until all have."""
        jax.distributed.shutdown()

    def exit_without_disconnecting(self, code: int) -> None:
        """Make the interpreter exit with a code before JAX's exit handlers, which wait for the other processes."""
        # Exit handlers run in reverse order, so this one runs before JAX's, and `exit_now` skips them.
        atexit.register(exit_now, code)

    def _next_key(self, kind: str, name: str) -> str:
        """Return a key that no earlier call has used."""
        key = f"{self._prefix}/{kind}/{name}"
        self._calls[key] += 1
        return f"{key}/{self._calls[key]}"


@contextmanager
def _convert_jax_errors(name: str) -> Iterator[None]:
    """Raise ConnectionBrokenError in place of the errors of jax in the block."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionBrokenError(
            f"the processes lost each other at {name!r}", str(error).partition("\n")[0]
        ) from error


# JAX aborts a process without a readable message when heartbeats stop. Its time-out is therefore a
# multiple of the watchdog's, and acts only if the watchdog itself has failed.
JAX_TIMEOUT_FACTOR = 10
# For `jax.distributed.initialize`. The processes have met before, so only its own handshake is left.
CONNECT_TIMEOUT_S = 60
ADDRESS_HINT = text(
    "{} with an address that all hosts can reach",
    Key("cluster.host0_address", "ADDRESS", is_override=True),
)


def start_processes(
    address: ProcessAddress | None, *, start_timeout_s: float, heartbeat_timeout_s: float
) -> ProcessGroup:
    """Connect this process with the other processes of its job. No device may have been used before.

    Processes connected by an earlier call or by the calling program stay connected.

    Args:
        address: This process. None if neither settings nor variables describe it.
        start_timeout_s: Seconds to wait for the other processes.
        heartbeat_timeout_s: Seconds without a heartbeat after which the watchdog counts a process as lost.

    Returns:
        The group of processes.

    Raises:
        PrepError: A process did not start in time, this one has used a device before, or the processes cannot be
            connected.
    """
    if jax.distributed.is_initialized():
        return _connected_group(address)
    if address is None and not _describes_tpu_pod(os.environ):
        return SingleProcess()
    if address is not None and address.count == 1:
        return SingleProcess()
    if backends_are_initialized():
        why = "this Python process has used jax's devices before, and jax can connect them only at its start"
        hint = "start a new Python process for each run, or call `jax.distributed.initialize` before the first one"
        raise PrepError("the processes cannot be connected", why, hint)
    errors = RuntimeErrors()
    # JAX's preemption service would take SIGTERM, on which the caller saves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with errors.intercept_client_errors():
            places = _initialize_jax(
                address, start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise _start_error(address, error) from error
    # On GPUs, the processes of a job divide the trials of kernels during a compilation. One that finds a program in its
    # folder would not take part, and the others would wait for its trials.
    if is_default_folder(os.environ):
        jax.config.update("jax_enable_compilation_cache", False)
    group = CoordinatedProcesses(errors, places)
    return group if group.count > 1 else SingleProcess()


def _initialize_jax(
    address: ProcessAddress | None, *, start_timeout_s: float, heartbeat_timeout_s: float
) -> dict[int, str]:
    """Initialize `jax.distributed`, and return the places of processes from `meet_processes`."""
    # On a TPU pod without an address, JAX finds the processes itself, and no places are known.
    heartbeat_timeout_seconds = math.ceil(heartbeat_timeout_s * JAX_TIMEOUT_FACTOR)
    shutdown_timeout_seconds = math.ceil(heartbeat_timeout_s)
    if address is None:
        jax.distributed.initialize(
            initialization_timeout=math.ceil(start_timeout_s),
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            shutdown_timeout_seconds=shutdown_timeout_seconds,
        )
        return {}
    check_coordinator_host(address)
    places = meet_processes(address, start_timeout_s)
    jax.distributed.initialize(
        address.coordinator,
        num_processes=address.count,
        process_id=address.index,
        local_device_ids=address.local_device_ids,
        # The address is complete, so JAX must not detect a cluster itself.
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_TIMEOUT_S,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )
    return places


def request_local_devices(count: int) -> None:
    """Let JAX divide this process's CPU into `count` devices, if it uses CPUs. Devices in use stay as they are."""
    if not backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", count)


def check_local_devices(count: int) -> None:
    """Initialize JAX's devices, and check that this process has `count` of them.

    Raises:
        UsageError: The process has a different number of devices. Either JAX was initialized before, or a variable
            such as CUDA_VISIBLE_DEVICES has to select the devices.
    """
    devices = local_devices()
    num_devices = len(devices)
    if num_devices == count:
        return
    platform = devices[0].platform
    variables = {
        "cpu": f"`JAX_NUM_CPU_DEVICES={count}` before Python starts",
        "gpu": "`CUDA_VISIBLE_DEVICES`",
    }
    hint = variables.get(platform, "the variables of the launcher")
    what = f"`cluster.n_local_devices` is {count}, and this process has {num_devices} x {platform}"
    raise usage_error(what, "the devices of a running process cannot be chosen again", hint)


def check_coordinator_host(address: ProcessAddress) -> None:
    """Raise PrepError if process 0 is on another host, and its address is a loopback address here.

    Args:
        address: This process. Nothing is checked if its launcher does not state the number of hosts.
    """
    if (address.host_count or 1) == 1:
        return
    host, _ = split_host_port(address.coordinator)
    reason = f"the processes run on {address.host_count} hosts"
    if is_loopback(host):
        raise PrepError(
            f"the address {host} of process 0 reaches only its own host", reason, ADDRESS_HINT
        )
    # Debian's /etc/hosts gives a host's own name the address 127.0.1.1, which is right on host 0.
    if not address.host_index:
        return
    try:
        resolved = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except OSError:
        # The name may not resolve yet. Connecting tries again, and reports it.
        return
    if resolved and all(is_loopback(ip) for ip in resolved):
        what = f"the host {host} of process 0 has the loopback address {resolved[0]} on host {socket.gethostname()}"
        raise PrepError(what, reason, text("correct /etc/hosts, or {}", ADDRESS_HINT))


def _connected_group(address: ProcessAddress | None) -> ProcessGroup:
    """Return the group of already connected processes. Raise PrepError if it is another job."""
    group = CoordinatedProcesses()
    if address is not None and (address.index, address.count) != (group.index, group.count):
        why = f"jax is connected as process {group.index} of {group.count}, and {address.reason} says otherwise"
        raise PrepError("the processes are connected already", why, "start a new process")
    return group if group.count > 1 else SingleProcess()


def _describes_tpu_pod(environ: Mapping[str, str]) -> bool:
    """Return whether the metadata server of a TPU virtual machine says which process this is. Only jax reads it."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return False
    is_described = environ.get("TPU_SKIP_MDS_QUERY") or any(
        environ.get(name) for name in TPU_HOST_VARIABLES
    )
    return runs_on_tpu_vm() and not is_described


def _start_error(address: ProcessAddress | None, error: Exception) -> PrepError:
    place = "this TPU host" if address is None else f"process {address.index} of {address.count}"
    one_process = Key("cluster.n_processes", 1, is_override=True)
    hint = text("{} trains in this process alone", one_process)
    return PrepError(f"jax cannot connect {place}", str(error).partition("\n")[0], hint)
