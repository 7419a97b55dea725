"""The server's lifetime: start, serve, drain, stop.

Stopping has a deadline: what is under way may finish until then, new calls are refused, and then
the process ends whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from kvstore import metrics
from kvstore.allocator import keep_large_buffers
from kvstore.arena import Arena
from kvstore.embedded import EmbeddedValkey
from kvstore.errors import ConfigError
from kvstore.report.board import Board
from kvstore.service import Service
from kvstore.store import Store
from kvstore.wire import chunks
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.limits import CHANNEL_OPTIONS

log = logging.getLogger("kvstore.server")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
METRICS_TIMEOUT_S = 5.0
USE_ANOTHER = "Use another --listen and --state-dir to run a second server"


class Server:
    """One server process's parts, started and stopped together."""

    def __init__(
        self,
        service: Service,
        store: Store,
        board: Board,
        arena: Arena,
        embedded: EmbeddedValkey | None,
        executor: ThreadPoolExecutor,
        targets: Sequence[str],
        metrics_address: str | None,
        drain_s: float,
    ):
        self.targets = targets
        self.metrics_address = metrics_address
        self.store = store
        self._service = service
        self._board = board
        self._arena = arena
        self._embedded = embedded
        self._executor = executor
        self._drain_s = drain_s
        self._health = HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._metrics: tuple[WSGIServer, threading.Thread] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens and serves.

        Raises:
            ConfigError: an address is taken or not this host's.
        """
        keep_large_buffers()
        server = grpc.aio.server(
            options=[
                *CHANNEL_OPTIONS,
                ("grpc.so_reuseport", 0),  # a second server on the same port must fail
            ]
        )
        chunks.add_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        for target in self.targets:
            self._bind(server, target)
        self._start_metrics()
        await server.start()
        self._grpc = server
        for name in ("", SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._tasks.append(asyncio.create_task(self.store.run()))
        if self._embedded is not None:
            self._tasks.append(asyncio.create_task(self._embedded.watch()))

    async def run_until_signalled(self) -> None:
        """Serves until SIGINT or SIGTERM, then stops. A second signal ends it at once."""
        signalled = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled.set)
        waiting = asyncio.create_task(signalled.wait())
        done, _ = await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        waiting.cancel()
        await self.stop()
        for task in done - {waiting}:
            task.result()  # a background task failed: say why

    async def stop(self) -> None:
        """Refuses new work, finishes what is under way within the deadline, frees everything."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_s
        await self._health.enter_graceful_shutdown()
        self._service.close()
        if self._grpc is not None:
            await self._grpc.stop(grace=self._drain_s / 2)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self.store.drain()
        except TimeoutError:
            log.warning("blocks were still on their way to the redis tier at the deadline")
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=max(deadline_s - loop.time(), 0.1))
        await self.close(max(deadline_s - loop.time(), 1.0))

    async def close(self, timeout_s: float) -> None:
        """Frees what the parts hold; also after a start that failed."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._metrics is not None:
            self._metrics[0].shutdown()
            self._metrics[0].server_close()
        if self.store.remote is not None:
            self.store.remote.close()
        if self._embedded is not None:
            await asyncio.to_thread(self._embedded.stop, timeout_s)
        self._arena.close()

    def _bind(self, server: grpc.aio.Server, target: str) -> None:
        path = Path(target.removeprefix("unix:")) if target.startswith("unix:") else None
        if path is not None:
            check_free(path)
            path.unlink(missing_ok=True)  # a killed server left it
        try:
            bound = server.add_insecure_port(target)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(
                f"can't listen on {target}: another server has it, or it isn't this host's. "
                f"{USE_ANOTHER}"
            )
        if path is not None:
            path.chmod(0o600)

    def _start_metrics(self) -> None:
        if self.metrics_address is None:
            return
        loop = asyncio.get_running_loop()

        async def snapshot() -> Any:
            return self._board.snapshot()

        def ask() -> Any:
            return asyncio.run_coroutine_threadsafe(snapshot(), loop).result(METRICS_TIMEOUT_S)

        host, _, port = self.metrics_address.rpartition(":")
        try:
            self._metrics = start_http_server(int(port), host, metrics.registry(ask))
        except OSError as error:
            raise ConfigError(
                f"can't serve metrics on {self.metrics_address}: {error.strerror}; "
                "use another --metrics address, or none"
            ) from error


def check_free(path: Path) -> None:
    """Raises ConfigError when a server listens on this unix socket; gRPC would take it over."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError(f"can't listen on unix:{path}: another server has it. {USE_ANOTHER}")
