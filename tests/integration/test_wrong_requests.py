"""Wrong requests are refused with the right status and a message that helps, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

import kvstore
from kvstore.testing import ServerProcess
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.integration.support import (
    BLOCK_BYTES,
    NOTHING_HELD,
    Raw,
    control,
    info_of,
    raw,
)
from tests.integration.wrong import (
    EXHAUSTED,
    INFO,
    INVALID,
    JOINED,
    KEYS,
    NEW,
    NOT_FOUND,
    PRECONDITION,
    body,
    header,
)

# -- namespaces and keys

WRONG_KEYS = {
    "none": (b"", "0 keys; a request has 1 to 65536"),
    "one-byte-short": (JOINED[:-1], "127 bytes are not a whole number of 32-byte keys"),
    "70,000": (KEYS[0] * 70_000, "70000 keys; a request has 1 to 65536"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_wrong_keys_are_refused_by_each_call_that_takes_keys(
    evil: Raw, refused: Callable[..., None], case: str
) -> None:
    keys, words = WRONG_KEYS[case]
    common = {"namespace": INFO.fingerprint, "keys": keys, "session": evil.session}
    look = pb.LookupRequest(**common, lease_ms=1000)
    refused(INVALID, words, lambda: evil.stub.Lookup(look))
    reserve = pb.ReserveRequest(**common, block_bytes=BLOCK_BYTES)
    refused(INVALID, words, lambda: evil.stub.Reserve(reserve))
    put = [header(evil, keys=keys), *body(KEYS)]
    refused(INVALID, words, lambda: evil.stub.Put(iter(put)))


def test_a_message_with_a_million_keys_is_refused_by_its_size(
    evil: Raw, refused: Callable[..., None]
) -> None:
    request = pb.LookupRequest(namespace=INFO.fingerprint, keys=bytes(32 * 10**6))
    # The channel of a client would refuse to send it, too; this one lets the server see it.
    channel = grpc.insecure_channel(evil.target, [("grpc.max_send_message_length", -1)])
    with channel:
        lookup = channel.unary_unary(
            "/kvstore.v1.KVStore/Lookup",
            request_serializer=pb.LookupRequest.SerializeToString,
            response_deserializer=pb.LookupResponse.FromString,
        )
        refused(EXHAUSTED, "message larger than max", lambda: lookup(request, timeout=10.0))


@pytest.mark.parametrize("raw_name", [b"", b"short", bytes(33)], ids=["empty", "5", "33"])
def test_a_namespace_of_the_wrong_length_is_refused(
    evil: Raw, refused: Callable[..., None], raw_name: bytes
) -> None:
    words = f"namespace: {len(raw_name)} bytes; a fingerprint has 32"
    stub, session = evil.stub, evil.session
    sized = {"namespace": raw_name, "block_bytes": BLOCK_BYTES}
    opening = pb.OpenNamespaceRequest(**sized, block_tokens=16)
    refused(INVALID, words, lambda: stub.OpenNamespace(opening))
    look = pb.LookupRequest(namespace=raw_name, keys=JOINED)
    refused(INVALID, words, lambda: stub.Lookup(look))
    reserve = pb.ReserveRequest(**sized, keys=JOINED, session=session)
    refused(INVALID, words, lambda: stub.Reserve(reserve))
    refused(INVALID, words, lambda: stub.Put(iter([header(evil, namespace=raw_name)])))
    usage = pb.RecordUsageRequest(namespace=raw_name)
    refused(INVALID, words, lambda: stub.RecordUsage(usage))
    if raw_name:  # an empty one stands for all
        refused(INVALID, words, lambda: stub.Clear(pb.ClearRequest(namespace=raw_name)))
        refused(INVALID, words, lambda: list(stub.Watch(pb.WatchRequest(namespace=raw_name))))


def test_an_unknown_namespace_is_refused_with_what_to_do(
    evil: Raw, refused: Callable[..., None]
) -> None:
    unknown = info_of("nobody opened this").fingerprint
    words = "is not open: call OpenNamespace first"
    stub, session = evil.stub, evil.session
    look = pb.LookupRequest(namespace=unknown, keys=JOINED)
    refused(NOT_FOUND, words, lambda: stub.Lookup(look))
    reserve = pb.ReserveRequest(
        namespace=unknown, keys=JOINED, session=session, block_bytes=BLOCK_BYTES
    )
    refused(NOT_FOUND, words, lambda: stub.Reserve(reserve))
    refused(NOT_FOUND, words, lambda: stub.Put(iter([header(evil, namespace=unknown)])))
    usage = pb.RecordUsageRequest(namespace=unknown)
    refused(NOT_FOUND, words, lambda: stub.RecordUsage(usage))
    refused(NOT_FOUND, words, lambda: stub.Clear(pb.ClearRequest(namespace=unknown)))


@pytest.mark.parametrize("size", [0, -1, -(1 << 62), 8 << 20, 1 << 40, (1 << 63) - 1])
def test_absurd_block_sizes_are_refused_with_the_sizes_that_fit(
    evil: Raw, refused: Callable[..., None], size: int
) -> None:
    opening = pb.OpenNamespaceRequest(namespace=bytes(32), block_bytes=size, block_tokens=16)
    refused(
        INVALID,
        f"a block of {size} bytes doesn't fit: this server takes 1 to 4194240 bytes a block",
        lambda: evil.stub.OpenNamespace(opening),
    )


@pytest.mark.parametrize("tokens", [0, -16])
def test_a_block_of_no_tokens_is_refused(
    evil: Raw, refused: Callable[..., None], tokens: int
) -> None:
    opening = pb.OpenNamespaceRequest(namespace=bytes(32), block_bytes=64, block_tokens=tokens)
    words = f"block_tokens: {tokens} is not positive"
    refused(INVALID, words, lambda: evil.stub.OpenNamespace(opening))


def test_names_that_are_too_long_are_refused(evil: Raw, refused: Callable[..., None]) -> None:
    for name in ("model", "tenant"):
        opening = pb.OpenNamespaceRequest(
            namespace=bytes(32), block_bytes=64, block_tokens=1, **{name: "x" * 513}
        )
        words = "a name has 513 characters, over 512"
        refused(INVALID, words, lambda opening=opening: evil.stub.OpenNamespace(opening))


@pytest.mark.parametrize(("block_bytes", "tokens"), [(BLOCK_BYTES * 2, 16), (BLOCK_BYTES, 32)])
def test_a_namespace_cannot_be_opened_again_with_other_blocks(
    evil: Raw, refused: Callable[..., None], block_bytes: int, tokens: int
) -> None:
    opening = pb.OpenNamespaceRequest(
        namespace=INFO.fingerprint, block_bytes=block_bytes, block_tokens=tokens
    )
    words = "is open with blocks of 16 tokens and 65536 bytes"
    refused(PRECONDITION, words, lambda: evil.stub.OpenNamespace(opening))
    evil.open(INFO)  # as it is, it can


# -- leases


def test_a_lease_must_have_a_session_and_a_time(evil: Raw, refused: Callable[..., None]) -> None:
    def look(session: int, lease_ms: int) -> Callable[[], Any]:
        request = pb.LookupRequest(
            namespace=INFO.fingerprint, keys=JOINED, session=session, lease_ms=lease_ms
        )
        return lambda: evil.stub.Lookup(request)

    refused(INVALID, "lease_ms: -1 is negative", look(evil.session, -1))
    refused(INVALID, "a time of up to 600 s", look(evil.session, 601_000))
    refused(NOT_FOUND, "session 0x0 is not attached", look(0, 1000))
    refused(NOT_FOUND, "session 0x2a is not attached", look(42, 1000))


@pytest.mark.parametrize("first", [-1, 1 << 30])
def test_a_lookup_begins_at_a_position_that_a_block_may_have(
    first: int, evil: Raw, refused: Callable[..., None]
) -> None:
    request = pb.LookupRequest(namespace=INFO.fingerprint, keys=JOINED, first=first)
    refused(INVALID, "no position of a block", lambda: evil.stub.Lookup(request))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"costs": "x" * 70_000}, "too many"),
        ({"decisions": [pb.Decision(gain_s=float("nan"))]}, "must be finite"),
        ({"decisions": [pb.Decision(load_reason=99)]}, "miss reason 99 is unknown"),
        ({"decisions": [pb.Decision(skip_reason=99)]}, "skip reason 99 is unknown"),
    ],
)
def test_what_an_engine_tells_of_its_decisions_must_make_sense(
    wrong: dict[str, Any], words: str, evil: Raw, refused: Callable[..., None]
) -> None:
    request = pb.RecordUsageRequest(namespace=INFO.fingerprint, **wrong)
    refused(INVALID, words, lambda: evil.stub.RecordUsage(request))
    refused(INVALID, "negative", lambda: evil.stub.Explain(pb.ExplainRequest(last=-1)))


def test_a_store_must_have_a_session_that_is_attached(
    evil: Raw, refused: Callable[..., None]
) -> None:
    words = "session 0x2a is not attached: its stream ended, or the server restarted"
    reserve = pb.ReserveRequest(
        namespace=INFO.fingerprint, keys=b"".join(NEW), block_bytes=BLOCK_BYTES, session=42
    )
    refused(NOT_FOUND, words, lambda: evil.stub.Reserve(reserve))
    put = [header(evil, session=42, keys=b"".join(NEW)), *body(NEW)]
    refused(NOT_FOUND, words, lambda: evil.stub.Put(iter(put)))
    usage = pb.RecordUsageRequest(
        namespace=INFO.fingerprint, session=42, usage=pb.Usage(requests=1)
    )
    refused(NOT_FOUND, words, lambda: evil.stub.RecordUsage(usage))


def calls_with(client: Raw, session: int, lease: int) -> dict[str, Callable[[], Any]]:
    """Every call that needs a lease, with this one."""
    ids = {"session": session, "lease": lease}
    return {
        "Fetch": lambda: list(client.stub.Fetch(pb.FetchRequest(**ids, first=0, count=1))),
        "Get": lambda: list(client.stub.Get(pb.GetRequest(**ids, first=0, count=1))),
        "Commit": lambda: client.stub.Commit(pb.CommitRequest(**ids)),
        "Abort": lambda: client.stub.Abort(pb.AbortRequest(**ids)),
    }


@pytest.mark.parametrize("call", ["Fetch", "Get", "Commit", "Abort"])
def test_a_lease_that_was_made_up_is_refused(
    evil: Raw, refused: Callable[..., None], call: str
) -> None:
    words = "lease 0x7 has expired, was released, or never existed"
    refused(NOT_FOUND, words, calls_with(evil, evil.session, 7)[call])


def test_the_leases_of_another_session_are_out_of_reach(
    server: ServerProcess, evil: Raw, refused: Callable[..., None], watcher: kvstore.Store
) -> None:
    with raw(server.target) as victim:
        reading = victim.lookup(INFO, KEYS).lease
        writing = victim.reserve(INFO, NEW).lease
        assert reading
        assert writing
        for lease in (reading, writing):
            words = f"lease {lease:#x} has expired, was released, or never existed"
            for call in calls_with(evil, evil.session, lease).values():
                refused(NOT_FOUND, words, call)
            evil.stub.Release(pb.ReleaseRequest(session=evil.session, leases=[lease]))
        held = {"leases": 2, "reserved_slots": 3, "quarantined_slots": 0}
        assert control(watcher) == held
        victim.stub.Abort(pb.AbortRequest(session=victim.session, lease=writing))
        victim.stub.Release(pb.ReleaseRequest(session=victim.session, leases=[reading]))
    assert control(watcher) == NOTHING_HELD


def test_a_lease_of_the_wrong_kind_is_refused(evil: Raw, refused: Callable[..., None]) -> None:
    reading = evil.lookup(INFO, KEYS).lease
    writing = evil.reserve(INFO, NEW).lease
    calls = calls_with(evil, evil.session, writing)
    refused(INVALID, "is for writing", calls["Fetch"])
    refused(INVALID, "is for writing", calls["Get"])
    calls = calls_with(evil, evil.session, reading)
    refused(INVALID, "is for reading", calls["Commit"])
    refused(INVALID, "is for reading; release it", calls["Abort"])
    evil.stub.Release(pb.ReleaseRequest(session=evil.session, leases=[reading, writing]))


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, -1), (0, 5), (4, 1), (2**31 - 1,) * 2])
def test_a_range_outside_the_lease_is_refused(
    evil: Raw, refused: Callable[..., None], first: int, count: int
) -> None:
    lease = evil.lookup(INFO, KEYS).lease
    ids = {"session": evil.session, "lease": lease, "first": first, "count": count}
    words = "are not within the lease's 4"
    refused(INVALID, words, lambda: list(evil.stub.Fetch(pb.FetchRequest(**ids))))
    refused(INVALID, words, lambda: list(evil.stub.Get(pb.GetRequest(**ids))))
    evil.stub.Release(pb.ReleaseRequest(session=evil.session, leases=[lease]))


def test_a_request_that_is_no_message_at_all_is_an_error_of_that_call_alone(evil: Raw) -> None:
    with grpc.insecure_channel(evil.target) as channel:
        for method in ("Lookup", "Reserve", "Commit", "RecordUsage", "Nonsense"):
            call = channel.unary_unary(f"/kvstore.v1.KVStore/{method}")
            with pytest.raises(grpc.RpcError):
                call(b"\xff\xff\xff\xff", timeout=5.0)
    assert evil.lookup(INFO, KEYS, lease_ms=0).present == 4
