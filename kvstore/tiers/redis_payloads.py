"""Blocks between Redis and the caller's memory, without a copy in between.

redis-py connects, authenticates, does TLS and knows the Cluster's topology. This borrows a
connection of its pool for one exchange: the commands go out with the payloads as they lie in
memory, and the payloads of the answers are received where they shall be. redis-py itself copies
each payload several times, which is most of what it costs.

A connection goes back to the pool only when every answer was read to its last byte. After
anything else it is closed, so an answer that comes late can't be taken for another block's.
What RESP2 allows but no command of ours answers with is an error too. What Redis wants to be
asked elsewhere (MOVED, ASK) is `ELSEWHERE`, and so is what was asked on a connection that broke:
redis-py then asks, since it knows how to follow and when to try again.

Knows nothing of headers' content, checksums or the ledger: the tier verifies what it gets.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.crc import key_slot
from redis.exceptions import InvalidResponse

Client = redis.Redis | redis.RedisCluster
Answer = TypeVar("Answer")

LINE_BYTES_MAX = 8192
"""An answer's line: a length, a number, or an error's message."""

FRAME_BYTES = 128
"""What is before the payload: the header's length in one byte, the header, and zeros."""

_BUFFERS_MAX = 512
"""That one `sendmsg` takes; Linux allows 1024."""


@dataclass(frozen=True, slots=True)
class Fields:
    """What Redis has under a name."""

    header: bytes | None
    payload_bytes: int | None
    """Its length, None if there is none; received in the caller's buffer if it has its size."""


class Elsewhere:
    """The answer of a block that has to be asked for through redis-py."""


ELSEWHERE = Elsewhere()
_REDIRECTS = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN")


def read(
    client: Client, names: Sequence[bytes], into: Sequence[memoryview]
) -> list[Fields | redis.ResponseError | Elsewhere]:
    """Receives blocks' payloads in the buffers; a buffer means nothing unless its answer is
    `Fields` with its size.

    Raises:
        redis.TimeoutError: Redis took too long.
        redis.RedisError: what came was not an answer.
    """
    commands = [_command(b"GET", name) for name in names]

    def receive(replies: _Replies, index: int) -> Fields | redis.ResponseError:
        return replies.fields(into[index])

    return _exchange(client, names, commands, receive)


def write(
    client: Client, names: Sequence[bytes], blocks: Sequence[tuple[bytes, memoryview]], ttl_ms: int
) -> list[bool | redis.ResponseError | Elsewhere]:
    """Writes blocks, each a header and a payload, with a time to live.

    Raises: as `read`.
    """
    ttl = b"%d" % ttl_ms
    commands = [
        _command(b"SET", name, (frame(header), payload), b"PX", ttl)
        for name, (header, payload) in zip(names, blocks, strict=True)
    ]

    def receive(replies: _Replies, index: int) -> bool | redis.ResponseError:
        return replies.done()

    return _exchange(client, names, commands, receive)


def frame(header: bytes) -> bytes:
    """What is written before the payload, of a fixed size: so the payload's place is known."""
    assert len(header) < FRAME_BYTES
    return bytes([len(header)]) + header.ljust(FRAME_BYTES - 1, b"\0")


def fields_of(value: bytes | memoryview, size: int) -> Fields:
    """The fields of a value of this size, of which at least the frame is given."""
    header = bytes(value[1 : 1 + value[0]]) if size >= FRAME_BYTES else None
    return Fields(header, max(size - FRAME_BYTES, 0))


def _exchange(
    client: Client,
    names: Sequence[bytes],
    commands: Sequence[Sequence[bytes | memoryview]],
    receive: Callable[[_Replies, int], Answer | redis.ResponseError],
) -> list[Answer | redis.ResponseError | Elsewhere]:
    """One pipeline to each node that has some of the names; answers in the names' order."""
    answers: list[Answer | redis.ResponseError | Elsewhere] = [ELSEWHERE] * len(names)
    for node, indexes in _by_node(client, names).items():
        received: list[Answer | redis.ResponseError | Elsewhere] = []
        try:
            with _borrowed(client, node) as sock:
                _send(sock, [part for index in indexes for part in commands[index]])
                replies = _Replies(sock)
                for index in indexes:
                    answer = receive(replies, index)
                    moved = isinstance(answer, Exception) and str(answer).startswith(_REDIRECTS)
                    received.append(ELSEWHERE if moved else answer)
                replies.check_end()
        except (redis.ConnectionError, ConnectionError):
            continue  # a pooled connection that the other side closed, or a node that is gone
        for index, each in zip(indexes, received, strict=True):
            answers[index] = each
    return answers


def _by_node(client: Client, names: Sequence[bytes]) -> dict[Any, list[int]]:
    """The positions of the names on each node; the only node of a Redis alone is None."""
    if not isinstance(client, redis.RedisCluster):
        return {None: list(range(len(names)))}
    nodes: dict[Any, list[int]] = {}
    for index, name in enumerate(names):
        node = client.nodes_manager.get_node_from_slot(key_slot(name))
        nodes.setdefault(node, []).append(index)
    return nodes


@contextmanager
def _borrowed(client: Client, node: Any) -> Iterator[socket.socket]:
    """A connection's socket, for one exchange; closed unless the exchange ends well."""
    owner = client.get_redis_connection(node) if isinstance(client, redis.RedisCluster) else client
    pool: Any = owner.connection_pool
    connection = pool.get_connection()
    try:
        # redis-py has no public name for it; every kind of its connections has this one.
        yield connection._sock
    except TimeoutError as error:
        connection.disconnect()
        raise redis.TimeoutError("Timeout in an exchange of blocks") from error
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _command(*parts: bytes | tuple[bytes, memoryview]) -> list[bytes | memoryview]:
    """A command in RESP, as pieces to be sent one after the other; payloads are not copied.

    A part is bytes, or a frame with its payload.
    """
    pieces: list[bytes | memoryview] = []
    text = b"*%d\r\n" % len(parts)
    for part in parts:
        if isinstance(part, bytes):
            text += b"$%d\r\n%b\r\n" % (len(part), part)
        else:
            first, payload = part
            text += b"$%d\r\n%b" % (len(first) + len(payload), first)
            pieces += [text, payload]
            text = b"\r\n"
    return [*pieces, text]


def _send(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    if isinstance(sock, ssl.SSLSocket):  # has no sendmsg
        for piece in pieces:
            sock.sendall(piece)
        return
    for start in range(0, len(pieces), _BUFFERS_MAX):
        views = [memoryview(piece) for piece in pieces[start : start + _BUFFERS_MAX]]
        first = 0
        while first < len(views):
            sent = sock.sendmsg(views[first:])
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]


class _Replies:
    """Reads answers from a socket. Payloads go straight to their place, all else through a
    buffer."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._buffer = memoryview(bytearray(LINE_BYTES_MAX))
        self._start = 0
        self._end = 0

    def fields(self, into: memoryview) -> Fields | redis.ResponseError:
        """A header and a payload; the payload in `into` if it has its size."""
        kind, text = self._line()
        if kind == b"-":
            return redis.ResponseError(text.decode(errors="replace"))
        if kind == b"$" and text == b"-1":
            return Fields(None, None)
        if kind != b"$" or not text.isdigit():
            raise InvalidResponse(f"expected a string, got {(kind + text)[:40]!r}")
        size = int(text)
        start = memoryview(bytearray(min(size, FRAME_BYTES)))
        self._exactly(start)
        left = size - len(start)
        self._bulk(left, into if left == into.nbytes else into[:0])
        return fields_of(start, size)

    def done(self) -> bool | redis.ResponseError:
        """Redis's OK."""
        kind, text = self._line()
        if kind == b"-":
            return redis.ResponseError(text.decode(errors="replace"))
        if (kind, text) != (b"+", b"OK"):
            raise InvalidResponse(f"expected OK, got {(kind + text)[:40]!r}")
        return True

    def check_end(self) -> None:
        """Raises unless all that came was read: more than was asked for is nobody's answer."""
        if self._start != self._end:
            raise InvalidResponse("more came than was asked for")

    def _bulk(self, size: int, into: memoryview) -> None:
        """Reads a string and its end: what fits into `into`, the rest to nowhere."""
        self._exactly(into)
        left = size - into.nbytes
        while left > 0:
            taken = min(left, self._end - self._start) or self._more(left)
            self._start += taken
            left -= taken
        end = memoryview(bytearray(2))
        self._exactly(end)
        if bytes(end) != b"\r\n":
            raise InvalidResponse("a string of another length than said")

    def _more(self, wanted: int) -> int:
        self._fill()
        return min(wanted, self._end - self._start)

    def _exactly(self, into: memoryview) -> None:
        filled = min(into.nbytes, self._end - self._start)
        into[:filled] = self._buffer[self._start : self._start + filled]
        self._start += filled
        while filled < into.nbytes:
            if into.nbytes - filled < LINE_BYTES_MAX:
                self._fill()
                taken = min(into.nbytes - filled, self._end)
                into[filled : filled + taken] = self._buffer[:taken]
                self._start = taken
            else:
                taken = self._received(into[filled:])
            filled += taken

    def _line(self) -> tuple[bytes, bytes]:
        """A line's first character and the rest of it."""
        line = b""
        while b"\n" not in line:
            if len(line) > LINE_BYTES_MAX:
                raise InvalidResponse("a line without end")
            if self._start == self._end:
                self._fill()
            rest = bytes(self._buffer[self._start : self._end])
            taken = rest.find(b"\n") + 1 or len(rest)
            line += rest[:taken]
            self._start += taken
        if not line.endswith(b"\r\n"):
            raise InvalidResponse(f"a line without its end: {line[:40]!r}")
        return line[:1], line[1:-2]

    def _fill(self) -> None:
        self._start, self._end = 0, 0
        self._end = self._received(self._buffer)

    def _received(self, into: memoryview) -> int:
        count = self._sock.recv_into(into)
        if count == 0:
            raise redis.ConnectionError("Redis closed the connection in an answer")
        return count
