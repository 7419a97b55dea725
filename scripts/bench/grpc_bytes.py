"""A rival: tensors as bytes in streamed gRPC messages, as plainly as gRPC allows.

A service in a process of its own, two methods, no protobuf: the messages are the bytes. What is
stored is kept as the messages that came, and is handed out and forgotten by the first load.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

MESSAGE_BYTES = 1 << 20
START_TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _serve(target: str, parent: Connection) -> None:
    kept: dict[bytes, list[bytes]] = {}

    def put(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        name = next(messages)
        kept[name] = list(messages)
        return b""

    def take(name: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from kept.pop(name)

    handlers: dict[str, Any] = {
        "Put": grpc.stream_unary_rpc_method_handler(put),
        "Take": grpc.unary_stream_rpc_method_handler(take),
    }
    server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Bytes", handlers),)
    )
    server.add_insecure_port(target)
    server.start()
    parent.send(True)
    with contextlib.suppress(EOFError):  # the parent has closed its end
        parent.recv()
    server.stop(None)


class BytesService:
    """The process and a connection to it. Use it as a context manager."""

    def __init__(self, target: str):
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(target, child), daemon=True)
        self._process.start()
        child.close()
        if not self._pipe.poll(START_TIMEOUT_S):
            self._process.kill()
            raise TimeoutError("the gRPC bytes service did not start")
        self._pipe.recv()
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        # No serialisers: a message is the bytes that it is given.
        self._put = self._channel.stream_unary("/bench.Bytes/Put", None, None)
        self._take = self._channel.unary_stream("/bench.Bytes/Take", None, None)

    def __enter__(self) -> BytesService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        self._pipe.close()
        self._process.join(5.0)
        self._process.kill()

    def put(self, name: bytes, data: Bytes) -> None:
        """Stores the bytes."""

        def messages() -> Iterator[bytes]:
            yield name
            for start in range(0, data.nbytes, MESSAGE_BYTES):
                yield data[start : start + MESSAGE_BYTES].tobytes()

        self._put(messages())

    def take(self, name: bytes, into: Bytes) -> None:
        """Copies what was stored to `into`, and drops it."""
        filled = 0
        for message in self._take(name):
            np.copyto(into[filled : filled + len(message)], np.frombuffer(message, np.uint8))
            filled += len(message)
