"""A slow network to a Redis: a proxy that delays and throttles what goes through it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

PIECE_BYTES = 1 << 16


class SlowLink:
    """Listens on a port of this host and forwards to a unix socket. Use it as a context manager.

    Each direction carries `bytes_per_s`, and what arrives does so half of `latency_s` later.
    """

    def __init__(self, socket: Path, bytes_per_s: float, latency_s: float):
        self._socket = socket
        self._piece_s = PIECE_BYTES / bytes_per_s
        self._delay_s = latency_s / 2
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> SlowLink:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def url(self) -> str:
        """For `kvstore serve --redis-url`."""
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(str(self._socket))
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes pieces at the link's rate, and hands each on after the delay."""
        loop = asyncio.get_running_loop()
        travelling: deque[tuple[float, bytes]] = deque()
        more = asyncio.Event()

        async def arrive() -> None:
            while True:
                await more.wait()
                while travelling:
                    due_s, piece = travelling.popleft()
                    await asyncio.sleep(max(due_s - loop.time(), 0))
                    if not piece:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                more.clear()

        arriving = asyncio.ensure_future(arrive())
        free_s = loop.time()
        while True:
            try:
                piece = await reader.read(PIECE_BYTES)
            except ConnectionError:
                piece = b""
            free_s = max(free_s, loop.time()) + self._piece_s * len(piece) / PIECE_BYTES
            travelling.append((free_s + self._delay_s, piece))
            more.set()
            if not piece:
                await arriving
                return
            await asyncio.sleep(max(free_s - loop.time(), 0))
