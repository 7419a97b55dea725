"""A client's calls on one stream: each takes its own answer, or none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvstore.client import calls as client_calls
from kvstore.client.calls import Calls
from kvstore.errors import InvalidRequest, Unavailable, UnknownLease
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.status import error_to_wire

LONG_S = 60.0


class Stream:
    """The server's side of a stream: sees what is sent, and answers when the test says."""

    def __init__(self) -> None:
        self.unclaimed: list[int] = []
        self.calls = Calls(self.unclaimed.append)
        self._requests = self.calls.requests(pb.AttachRequest(client="test"))
        assert next(self._requests).WhichOneof("call") == "attach"

    def next(self) -> pb.SessionRequest:
        """The next message that is sent."""
        return next(self._requests)

    def answer(self, call: pb.SessionRequest, lease: int = 0) -> None:
        """Answers a lookup."""
        found = pb.LookupResponse(lease=lease)
        self.calls.answered(pb.SessionResponse(id=call.id, lookup=found))


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


Ask = Callable[..., "Future[pb.LookupResponse]"]


@pytest.fixture
def ask(stream: Stream, pool: ThreadPoolExecutor) -> Ask:
    """Starts a lookup on a thread of its own; its keys say which."""

    def ask(keys: bytes = b"", timeout_s: float = LONG_S) -> Future[pb.LookupResponse]:
        return pool.submit(stream.calls.lookup, pb.LookupRequest(keys=keys), timeout_s)

    return ask


def test_answers_in_any_order_reach_the_calls_that_they_belong_to(stream: Stream, ask: Ask) -> None:
    asked = {bytes([number]): ask(bytes([number])) for number in range(64)}
    sent = [stream.next() for _ in asked]
    assert len({call.id for call in sent}) == 64
    for call in reversed(sent):
        stream.answer(call, lease=call.lookup.keys[0] + 1)
    assert all(answer.result().lease == keys[0] + 1 for keys, answer in asked.items())
    assert stream.unclaimed == []


def test_a_late_answer_is_nobodys_and_its_lease_is_given_back(stream: Stream, ask: Ask) -> None:
    late = ask(b"late", timeout_s=0.01)
    sent = stream.next()
    with pytest.raises(Unavailable, match="no answer within"):
        late.result()
    other = ask(b"other")
    call = stream.next()
    stream.answer(sent, lease=7)
    assert not other.done()
    stream.answer(call, lease=8)
    assert other.result().lease == 8
    assert stream.unclaimed == [7]


def test_the_slots_of_a_late_reservation_are_given_back(
    stream: Stream, pool: ThreadPoolExecutor
) -> None:
    late = pool.submit(stream.calls.reserve, pb.ReserveRequest(), 0.01)
    sent = stream.next()
    with pytest.raises(Unavailable):
        late.result()
    reserved = pb.ReserveResponse(lease=9, slot_offsets=[4096])
    stream.calls.answered(pb.SessionResponse(id=sent.id, reserve=reserved))
    assert stream.unclaimed == [9]


def test_an_answer_that_comes_twice_or_that_nobody_asked_for_is_dropped(
    stream: Stream, ask: Ask
) -> None:
    first = ask()
    call = stream.next()
    stream.answer(call, lease=1)
    stream.answer(call, lease=2)
    stream.calls.answered(pb.SessionResponse(id=12345, abort=pb.AbortResponse()))
    assert first.result().lease == 1
    assert stream.unclaimed == [2]


def test_a_call_that_has_given_up_is_not_sent(stream: Stream, ask: Ask) -> None:
    with pytest.raises(Unavailable):
        ask(b"given up", timeout_s=0.01).result()
    ask(b"next", timeout_s=1.0)
    assert stream.next().lookup.keys == b"next"


def test_an_answer_of_another_kind_is_never_taken(stream: Stream, ask: Ask) -> None:
    asked = ask()
    call = stream.next()
    stream.calls.answered(pb.SessionResponse(id=call.id, reserve=pb.ReserveResponse(lease=1)))
    with pytest.raises(Unavailable, match="answered lookup with another call"):
        asked.result()
    empty = ask()
    stream.calls.answered(pb.SessionResponse(id=stream.next().id))
    with pytest.raises(Unavailable, match="answered lookup with another call"):
        empty.result()


@pytest.mark.parametrize("error", [InvalidRequest("words"), UnknownLease("words")])
def test_an_error_is_raised_where_the_call_was_made(
    stream: Stream, ask: Ask, error: Exception
) -> None:
    asked = ask()
    stream.calls.answered(pb.SessionResponse(id=stream.next().id, error=error_to_wire(error)))
    with pytest.raises(type(error), match="words"):
        asked.result()


def test_a_fault_of_the_server_is_an_absence(stream: Stream, ask: Ask) -> None:
    asked = ask()
    fault = error_to_wire(ZeroDivisionError("ours"))
    stream.calls.answered(pb.SessionResponse(id=stream.next().id, error=fault))
    with pytest.raises(Unavailable, match="ours"):
        asked.result()


def test_when_the_stream_ends_its_calls_fail_at_once_and_so_do_later_ones(
    stream: Stream, ask: Ask
) -> None:
    asked = [ask() for _ in range(64)]
    for _ in asked:
        stream.next()
    stream.calls.end()
    for call in asked:
        with pytest.raises(Unavailable, match="went away"):
            call.result()
    with pytest.raises(Unavailable, match="gone"):
        ask().result()
    with pytest.raises(StopIteration):
        stream.next()


def test_calls_that_wait_have_a_limit(
    stream: Stream, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_calls, "CALLS_MAX", 2)
    asked = [ask(), ask()]
    sent = [stream.next(), stream.next()]
    with pytest.raises(Unavailable, match="2 calls wait"):
        ask().result()
    for call in sent:
        stream.answer(call)
    assert [call.result().present for call in asked] == [0, 0]


def test_answers_that_come_as_their_calls_give_up_are_taken_or_given_back(
    stream: Stream, ask: Ask
) -> None:
    # Whichever comes first, each lease has exactly one owner.
    stop = threading.Event()
    granted = []

    def serve() -> None:
        while not stop.is_set():
            call = stream.next()
            stream.answer(call, lease=call.id)
            granted.append(call.id)

    server = threading.Thread(target=serve)
    server.start()
    taken = []
    for call in [ask(timeout_s=0.0005 * (number % 4)) for number in range(400)]:
        with contextlib.suppress(Unavailable):
            taken.append(call.result().lease)
    stop.set()
    taken.append(ask().result().lease)
    server.join()
    assert sorted(taken + stream.unclaimed) == granted


def test_a_server_that_does_not_answer_counts_as_away_until_it_answers_anything(
    stream: Stream, ask: Ask
) -> None:
    late = ask(b"late", timeout_s=0.01)
    sent = stream.next()
    with pytest.raises(Unavailable):
        late.result()
    assert stream.calls.silent
    stream.answer(sent)
    assert not stream.calls.silent
