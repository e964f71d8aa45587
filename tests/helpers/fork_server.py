"""Processes that run commands or scripts, forked from a process that has already imported prep.

A new interpreter spends most of the time of a small command on imports. Use `start_prep` where the command is the
subject of a test, and `subprocess` where the start of the interpreter is. The server does not import huggingface_hub,
which reads environment variables on import. A second server has imported JAX, which reads some variables on import too,
but has not started its devices. It forks commands that train with the environment of the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

PRELOADED = (
    "numpy",
    "prepcli.commands.cli.main",
    "prepcli.commands.operations.export",
    "prepcli.commands.operations.inspect",
    "prepcli.commands.operations.pad_vocab",
    "prepcli.commands.operations.tokens",
    "prepcli.commands.operations.export",
    "prepcli.commands.operations.save_init",
    "prepcli.commands.operations.verify",
    "prepcli.commands.rendering.checkpoints",
    "prepcli.commands.rendering.inspection",
    "prepcli.commands.rendering.checkpoints",
    "pydantic.type_adapter",
    "zstandard",
)
# huggingface_hub imports these modules, and the HTTP library the ones of its connections with the first request.
PRELOADED_IF_INSTALLED = (
    *("filelock", "h11", "httpcore", "httpcore2", "httpx", "httpx2"),
    *("tqdm.auto", "truststore", "yaml"),
)
PRELOADED_WITH_JAX = (
    "jax",
    "trainer.training.loop",
    "prepcli.commands.operations.train",
    "trainer.run.train",
)
PREP = "import sys; from prepcli.commands.cli.main import main; sys.exit(main())"
MAX_REQUEST_NBYTES = 1 << 17
MAX_FD = 256


class ForkedProcess:
    """A forked command, with the part of the interface of `subprocess.Popen[bytes]` that tests use."""

    def __init__(
        self, pid: int, stdout: IO[bytes], stderr: IO[bytes], *, status: socket.socket
    ) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._read_code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code and return it."""
        code = self._read_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("prep", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Read stdout and stderr to their ends, wait for the exit code, and return both outputs."""
        deadline = None if timeout is None else time.monotonic() + timeout
        outputs = {self.stdout: b"", self.stderr: b""}
        unfinished = [stream for stream in outputs if not stream.closed]
        while unfinished:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = _wait_readable(unfinished, remaining)
            if not ready:
                raise subprocess.TimeoutExpired("prep", timeout or 0)
            for stream in ready:
                data = os.read(stream.fileno(), 1 << 16)
                outputs[stream] += data
                if not data:
                    unfinished.remove(stream)
                    stream.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return outputs[self.stdout], outputs[self.stderr]

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            # It may end after the look.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _read_code(self, timeout: float | None) -> int | None:
        """Return the exit code, None if the process still runs after the timeout."""
        if self.returncode is None and _wait_readable([self._status], timeout):
            self.returncode = int(self._status.recv(16))
            self._status.close()
        return self.returncode


def _wait_readable(files: Sequence[Any], timeout: float | None) -> list[Any]:
    """Return the files that can be read; `select.select` takes no descriptors of 1,024 and more."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]


def start_python(
    script: str,
    *words: str,
    cwd: str | os.PathLike[str] = ".",
    env: Mapping[str, str] | None = None,
    has_jax: bool = False,
    stdin: str | os.PathLike[str] = os.devnull,
) -> ForkedProcess:
    """Start a script with the arguments `words` in a folder, like `python -c`.

    Args:
        script: Code of the script.
        *words: Its arguments.
        cwd: Working folder.
        env: Environment variables. None for those of the tests.
        has_jax: Whether JAX is imported before, with the environment of the tests.
        stdin: File that the script reads as stdin.
    """
    variables = dict(os.environ if env is None else env)
    request = {"script": script, "words": words, "cwd": os.path.abspath(cwd), "env": variables}
    request |= {"stdin": os.path.abspath(stdin)}
    status, status_of_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    ends = (out_end, err_end, status_of_server.detach())
    socket.send_fds(_connect(os.getpid(), has_jax), [json.dumps(request).encode()], ends)
    for end in ends:
        os.close(end)
    pid = int(status.recv(16))
    return ForkedProcess(pid, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0), status=status)


def read_until(process: ForkedProcess | subprocess.Popen[bytes], text: str) -> str:
    """Read stderr of a process until it has a text, and return it. Raise AssertionError if it ends before."""
    assert process.stderr is not None
    output = b""
    while text.encode() not in output:
        data = os.read(process.stderr.fileno(), 1 << 16)
        assert data, f"{output.decode()!r} has no {text!r}"
        output += data
    return output.decode()


def run_python(
    script: str,
    *words: str,
    cwd: str | os.PathLike[str] = ".",
    env: Mapping[str, str] | None = None,
    has_jax: bool = False,
    stdin: str | os.PathLike[str] = os.devnull,
) -> subprocess.CompletedProcess[str]:
    """Run a script as `start_python` does, and return its exit code and output."""
    process = start_python(script, *words, cwd=cwd, env=env, has_jax=has_jax, stdin=stdin)
    out, err = process.communicate()
    return subprocess.CompletedProcess([*words], process.wait(), out.decode(), err.decode())


def start_prep(*words: str, cwd: str | os.PathLike[str]) -> ForkedProcess:
    """Start `prep WORDS` in a folder."""
    return start_python(PREP, *words, cwd=cwd)


def run_prep(
    *words: str, cwd: str | os.PathLike[str], has_jax: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `prep WORDS` in a folder, and return its exit code and output."""
    return run_python(PREP, *words, cwd=cwd, has_jax=has_jax)


@cache
def _connect(pid: int, has_jax: bool) -> socket.socket:
    """Return the connection of the process `pid` to a server of its own, which ends when that process does."""
    requests, requests_of_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # XLA reads the level when it is loaded. Jobs would print warnings of its partitioner.
    level = {"TF_CPP_MIN_LOG_LEVEL": "3"} if has_jax else {}
    with requests_of_server:
        fd = requests_of_server.fileno()
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(fd), *(PRELOADED_WITH_JAX if has_jax else ())],
            env={**os.environ, **level, "PYTHONPATH": str(Path(__file__).parents[2])},
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # In its own session, the server does not get Ctrl-C before its client.
            start_new_session=True,
        )
    atexit.register(_stop, requests, server)
    return requests


def _stop(requests: socket.socket, server: subprocess.Popen[bytes]) -> None:
    """Close the server's socket, so that it ends, and wait for it."""
    requests.close()
    server.wait()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Import modules, fork a process for each request, and report its process id and later its exit code."""
    for name in (*PRELOADED, *filter(_is_installed, PRELOADED_IF_INSTALLED), *modules):
        importlib.import_module(name)
    # Otherwise each process would read the options of its command.
    commands = importlib.import_module("prepcli.commands.cli.root").command_group().commands
    for name in commands:
        commands[name]
    # `select.select` would fail for descriptors above 1023, which a long test session may reach.
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_NBYTES, 3)
                if not data:
                    return
                pid, status = _fork(json.loads(data), *fds, inherited=(selector, requests))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
            else:
                pid, status = key.data
                _send(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                selector.unregister(key.fd)
                os.close(status)
                os.close(key.fd)


def _fork(
    request: dict[str, Any], out: int, err: int, status: int, *, inherited: Sequence[Any]
) -> tuple[int, int]:
    """Return the process id of a new process, which closes `inherited`, and the socket for its exit code."""
    pid = os.fork()
    if pid == 0:
        # Python closes open objects at its exit. Their descriptors may belong to other files by then.
        for file in inherited:
            file.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, MAX_FD)
        os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = ["-c", *request["words"]]
        exec(compile(request["script"], "<script>", "exec"), {"__name__": "__main__"})
        raise SystemExit(0)
    os.close(out)
    os.close(err)
    _send(status, pid)
    return pid, status


def _send(fd: int, number: int) -> None:
    """Send a number to the client."""
    # The client may have stopped waiting for this process.
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, str(number).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
