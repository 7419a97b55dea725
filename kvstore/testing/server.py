"""A real server process, with its own state folder and ports, for tests and demos."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from kvstore.client import Store
from kvstore.errors import Unavailable

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


class ServerProcess:
    """`kvstore serve` in a process of its own. Use it as a context manager.

    It listens on a unix socket in its folder and on a TCP port; both stay the same over
    `restart`. Its output goes to `serve.log` in the folder.
    """

    def __init__(self, folder: Path, *flags: str, cpu_bytes: str = "64MiB"):
        """`flags` are passed to `kvstore serve`. The folder's path must be short: it holds unix
        sockets, whose paths are limited to about 100 characters.
        """
        self.folder = folder
        self.port = _free_port()
        self.metrics_port = _free_port()
        self.target = f"127.0.0.1:{self.port}"
        self.log = folder / "serve.log"
        self._flags = [
            f"--state-dir={folder}",
            f"--listen={self.target}",
            f"--metrics=127.0.0.1:{self.metrics_port}",
            f"--cpu-bytes={cpu_bytes}",
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the process and waits until it answers.

        Raises:
            Unavailable: it ended, or did not answer in time; the message has its output.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", *self._flags],
                stdout=log,
                stderr=log,
                env=environment,
            )
        with Store(self.target) as store:
            waited_s = 0.0
            while not store.wait_attached(0.0):
                try:
                    code: int | None = self._process.wait(0.05)
                except subprocess.TimeoutExpired:
                    code = None
                waited_s += 0.05
                if code is not None or waited_s > START_TIMEOUT_S:
                    self.kill()
                    raise Unavailable(f"the server did not start:\n{self.log.read_text()}")

    def stop(self) -> None:
        """Stops the process as Ctrl-C would, and waits; kills it when that takes too long."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits until the process has ended by itself; its exit code.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def kill(self) -> None:
        """Kills the process, as the kernel would when memory runs out."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kills and starts it again, on the same addresses."""
        self.kill()
        self.start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
