"""The calls that have to be fast, on one stream that is the client's session.

Any number of threads call at a time. Each call has an id that no other call of the stream ever
has, and takes only the answer that carries it, so an answer that comes after its call has given
up is never taken for another's. What such an answer granted is given back. When the stream ends,
all its calls fail at once.

Knows nothing of what the calls are about, or of how to get a stream.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from kvstore.errors import Unavailable
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.status import error_from_wire

CALLS_MAX = 4096
"""Calls that wait for an answer; more are refused at once."""

SILENCE_S = 1.0
"""How long nothing is asked of a server that has not answered a call in time."""


class _Waiter:
    """A call that waits for its answer; None when the stream ended first."""

    __slots__ = ("answer", "answered")

    def __init__(self) -> None:
        self.answer: pb.SessionResponse | None = None
        self.answered = threading.Lock()  # the cheapest thing to wait for
        self.answered.acquire()


class Calls:
    """The calls of one session. Thread-safe."""

    def __init__(self, unclaimed: Callable[[int], None]):
        """`unclaimed` gets each lease that was granted to a call that had given up."""
        self._unclaimed = unclaimed
        self._requests: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        self._waiting: dict[int, _Waiter] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._ended = False
        self._silent_until_s = 0.0

    def lookup(self, request: pb.LookupRequest, timeout_s: float) -> pb.LookupResponse:
        """See the wire contract; this and the others raise KVStoreError."""
        return self._call(pb.SessionRequest(lookup=request), timeout_s).lookup

    def reserve(self, request: pb.ReserveRequest, timeout_s: float) -> pb.ReserveResponse:
        """See the wire contract."""
        return self._call(pb.SessionRequest(reserve=request), timeout_s).reserve

    def commit(self, request: pb.CommitRequest, timeout_s: float) -> pb.CommitResponse:
        """See the wire contract."""
        return self._call(pb.SessionRequest(commit=request), timeout_s).commit

    def abort(self, request: pb.AbortRequest, timeout_s: float) -> None:
        """See the wire contract."""
        self._call(pb.SessionRequest(abort=request), timeout_s)

    def release(self, request: pb.ReleaseRequest, timeout_s: float) -> None:
        """See the wire contract."""
        self._call(pb.SessionRequest(release=request), timeout_s)

    def note_silence(self) -> None:
        """The server has not answered in time. It may hang for long.

        One call a while finds out whether it does, not each one that is waiting.
        """
        self._silent_until_s = time.monotonic() + SILENCE_S

    @property
    def silent(self) -> bool:
        """Whether nothing should be asked for the moment: the server counts as away."""
        return time.monotonic() < self._silent_until_s

    def _call(self, request: pb.SessionRequest, timeout_s: float) -> pb.SessionResponse:
        waiter = _Waiter()
        with self._lock:
            if self._ended:
                raise Unavailable("the server is gone")
            if len(self._waiting) >= CALLS_MAX:
                raise Unavailable(f"{CALLS_MAX} calls wait for an answer already")
            request.id = next(self._ids)
            self._waiting[request.id] = waiter
        self._requests.put(request)
        try:
            in_time = waiter.answered.acquire(timeout=timeout_s)
        except BaseException:  # an interrupt: nobody will take the answer
            self._waiting.pop(request.id, None)
            raise
        if not in_time and self._waiting.pop(request.id, None) is None:
            waiter.answered.acquire()  # it came in this very moment, and may hold a lease
        elif not in_time:
            self.note_silence()
            raise Unavailable(f"no answer within {timeout_s:g} s")
        answer = waiter.answer
        if answer is None:
            raise Unavailable("the server went away before it answered")
        if answer.HasField("error"):
            raise error_from_wire(answer.error)
        if answer.WhichOneof("answer") != request.WhichOneof("call"):
            raise Unavailable(f"the server answered {request.WhichOneof('call')} with another call")
        return answer

    # -- the stream's side

    def requests(self, attach: pb.AttachRequest) -> Iterator[pb.SessionRequest]:
        """What to send: the attach, and then calls, until `end`."""
        yield pb.SessionRequest(attach=attach)
        while (request := self._requests.get()) is not None:
            if request.id in self._waiting:  # else it has given up already
                yield request

    def answered(self, answer: pb.SessionResponse) -> None:
        """Hands an answer to the call that waits for it, if it still does."""
        self._silent_until_s = 0.0
        waiter = self._waiting.pop(answer.id, None)
        if waiter is not None:
            waiter.answer = answer
            waiter.answered.release()
            return
        lease = answer.lookup.lease or answer.reserve.lease
        if lease:
            self._unclaimed(lease)

    def end(self) -> None:
        """The stream has ended: fails the calls that wait, and all that come."""
        with self._lock:
            self._ended = True
            waiting = [self._waiting.pop(call, None) for call in list(self._waiting)]
        for waiter in waiting:
            if waiter is not None:
                waiter.answered.release()
        self._requests.put(None)
