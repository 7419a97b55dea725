"""Wrong requests are refused with the right status and a message that helps, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvstore
from kvstore import codec
from kvstore.testing import ServerProcess
from kvstore.types import BlockKey
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.integration.support import (
    BLOCK_BYTES,
    NOTHING_HELD,
    Raw,
    chain,
    content,
    control,
    info_of,
    raw,
    report,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

INFO = info_of("wrong requests", model="m", tenant="t")
KEYS = chain("wrong requests", 4)
JOINED = b"".join(KEYS)
NEW = chain("never stored", 3)


def header(client: Raw, **changes: Any) -> pb.PutRequest:
    """The first message of a Put of four blocks."""
    fields = {
        "namespace": INFO.fingerprint,
        "keys": JOINED,
        "block_bytes": BLOCK_BYTES,
        "session": client.session,
    }
    return pb.PutRequest(header=pb.PutHeader(**fields | changes))


def body(keys: list[BlockKey]) -> list[pb.PutRequest]:
    """The messages after the header."""
    messages = []
    for key in keys:
        messages.append(pb.PutRequest(chunk=content(key)))
        messages.append(pb.PutRequest(checksum=codec.checksum(content(key))))
    return messages


@pytest.fixture(scope="module")
def watcher(server: ServerProcess) -> Iterator[kvstore.Store]:
    """A well-behaved client, which sees whether anything changed."""
    with kvstore.connect(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def evil(server: ServerProcess) -> Iterator[Raw]:
    """A raw client with the namespace open and its four blocks stored."""
    with raw(server.target) as client:
        client.open(INFO)
        answer = client.stub.Put(iter([header(client), *body(KEYS)]))
        assert list(answer.answers) == [pb.ReserveResponse.ANSWER_RESERVED] * 4
        yield client


@pytest.fixture
def refused(watcher: kvstore.Store, evil: Raw) -> Callable[..., None]:
    """Makes the call, and checks its status, its message, and that nothing has changed."""

    def state() -> Any:
        document = report(watcher)
        cpu = next(tier for tier in document["tiers"] if tier["name"] == "cpu")
        del cpu["counters"]["aborted"]  # the one trace of a Put that goes wrong half way
        del document["control"]["rpc"], document["taken_at"], document["server"]
        return document

    def check(code: grpc.StatusCode, words: str, call: Callable[[], Any]) -> None:
        before = state()
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert isinstance(caught.value, grpc.Call)
        assert (caught.value.code(), words in (caught.value.details() or "")) == (code, True), (
            caught.value.code(),
            caught.value.details(),
        )
        assert state() == before

    return check


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


# -- storing


@pytest.mark.parametrize("size", [0, -1, BLOCK_BYTES - 1, BLOCK_BYTES * 2, 1 << 40])
def test_a_size_that_is_not_the_namespaces_is_refused(
    evil: Raw, refused: Callable[..., None], size: int
) -> None:
    words = f"blocks of {size} bytes, but this namespace's have {BLOCK_BYTES}"
    reserve = pb.ReserveRequest(
        namespace=INFO.fingerprint, keys=JOINED, block_bytes=size, session=evil.session
    )
    refused(INVALID, words, lambda: evil.stub.Reserve(reserve))
    refused(INVALID, words, lambda: evil.stub.Put(iter([header(evil, block_bytes=size)])))


def test_a_parent_of_the_wrong_length_is_refused(evil: Raw, refused: Callable[..., None]) -> None:
    words = "parent: 31 bytes; a key has 32, or is left out"
    reserve = pb.ReserveRequest(
        namespace=INFO.fingerprint,
        keys=b"".join(NEW),
        parent=bytes(31),
        block_bytes=BLOCK_BYTES,
        session=evil.session,
    )
    refused(INVALID, words, lambda: evil.stub.Reserve(reserve))
    put = [header(evil, parent=bytes(31), keys=b"".join(NEW)), *body(NEW)]
    refused(INVALID, words, lambda: evil.stub.Put(iter(put)))


def new_header(client: Raw) -> pb.PutRequest:
    return header(client, keys=b"".join(NEW))


WRONG_PUTS: dict[str, tuple[Callable[[Raw], list[pb.PutRequest]], str]] = {
    "nothing at all": (lambda client: [], "the first message must be a header"),
    "no header": (lambda client: body(NEW), "the first message must be a header"),
    "an empty message": (lambda client: [pb.PutRequest()], "the first message must be a header"),
    "two headers": (
        lambda client: [new_header(client), new_header(client), *body(NEW)],
        f"a header after 0 of a block's {BLOCK_BYTES} bytes",
    ),
    "no bytes": (
        lambda client: [new_header(client)],
        f"ended after 0 of a block's {BLOCK_BYTES} bytes",
    ),
    "half a block": (
        lambda client: [new_header(client), pb.PutRequest(chunk=bytes(BLOCK_BYTES // 2))],
        f"ended after {BLOCK_BYTES // 2} of a block's {BLOCK_BYTES} bytes",
    ),
    "one block of three": (
        lambda client: [new_header(client), *body(NEW[:1])],
        f"ended after 0 of a block's {BLOCK_BYTES} bytes",
    ),
    "no last checksum": (
        lambda client: [new_header(client), *body(NEW)[:-1]],
        f"ended after {BLOCK_BYTES} of a block's {BLOCK_BYTES} bytes",
    ),
    "a byte too many": (
        lambda client: [new_header(client), pb.PutRequest(chunk=bytes(BLOCK_BYTES + 1))],
        f"a chunk after 0 of a block's {BLOCK_BYTES} bytes",
    ),
    "a checksum too early": (
        lambda client: [
            new_header(client),
            pb.PutRequest(chunk=bytes(64)),
            pb.PutRequest(checksum=1),
        ],
        f"a checksum after 64 of a block's {BLOCK_BYTES} bytes",
    ),
}


@pytest.mark.parametrize("case", WRONG_PUTS)
def test_a_put_that_is_not_header_and_blocks_stores_nothing(
    evil: Raw, refused: Callable[..., None], case: str
) -> None:
    messages, words = WRONG_PUTS[case]
    refused(INVALID, words, lambda: evil.stub.Put(iter(messages(evil)), timeout=10.0))
    assert evil.lookup(INFO, NEW, lease_ms=0).present == 0


def test_a_put_with_a_wrong_checksum_drops_that_block_alone(
    evil: Raw, watcher: kvstore.Store
) -> None:
    keys = chain("wrong checksum", 3)
    messages = body(keys)
    messages[3] = pb.PutRequest(checksum=codec.checksum(content(keys[1])) ^ 1)
    answer = evil.stub.Put(iter([header(evil, keys=b"".join(keys)), *messages]))
    assert answer.corrupt == 1
    assert evil.lookup(INFO, keys, lease_ms=0).present == 1
    assert evil.lookup(INFO, keys[2:], lease_ms=0).present == 1
    assert control(watcher) == NOTHING_HELD


WRONG_COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "too few checksums": ({"checksums": bytes(16)}, "2 checksums for 3 reserved blocks"),
    "too many checksums": ({"checksums": bytes(32)}, "4 checksums for 3 reserved blocks"),
    "half a checksum": ({"checksums": bytes(20)}, "20 bytes are not a whole number of 8-byte sums"),
    "a position beyond": ({"failed": [3]}, "failed positions [3] of 3 blocks"),
    "a negative position": ({"failed": [-1]}, "failed positions [-1] of 3 blocks"),
}


@pytest.mark.parametrize("case", WRONG_COMMITS)
def test_a_wrong_commit_changes_nothing_and_can_be_made_again(
    evil: Raw, refused: Callable[..., None], case: str
) -> None:
    fields, words = WRONG_COMMITS[case]
    keys = chain(case, 3)
    lease = evil.reserve(INFO, keys).lease
    ids = {"session": evil.session, "lease": lease}
    refused(INVALID, words, lambda: evil.stub.Commit(pb.CommitRequest(**ids, **fields)))
    assert evil.lookup(INFO, keys, lease_ms=0).present == 0
    assert evil.stub.Commit(pb.CommitRequest(**ids, failed=[2])).committed == 2
    assert evil.lookup(INFO, keys, lease_ms=0).present == 2


def test_a_lease_can_be_committed_once(evil: Raw, refused: Callable[..., None]) -> None:
    lease = evil.reserve(INFO, chain("once", 1)).lease
    ids = {"session": evil.session, "lease": lease}
    assert evil.stub.Commit(pb.CommitRequest(**ids)).committed == 1
    words = "has expired, was released, or never existed"
    refused(NOT_FOUND, words, lambda: evil.stub.Commit(pb.CommitRequest(**ids)))
    refused(NOT_FOUND, words, lambda: evil.stub.Abort(pb.AbortRequest(**ids)))


def test_a_server_that_verifies_always_takes_no_commit_without_checksums(folder: Path) -> None:
    with (
        ServerProcess(folder, "--no-redis", "--verify=always", cpu_bytes="8MiB") as server,
        raw(server.target) as client,
    ):
        client.open(INFO)
        lease = client.reserve(INFO, KEYS).lease
        ids = {"session": client.session, "lease": lease}
        with pytest.raises(grpc.RpcError, match="commit needs checksums") as caught:
            client.stub.Commit(pb.CommitRequest(**ids))
        assert caught.value.code() is PRECONDITION
        assert client.lookup(INFO, KEYS, lease_ms=0).present == 0
        client.stub.Abort(pb.AbortRequest(**ids))


def test_blocks_that_follow_themselves_do_not_stop_the_server(evil: Raw) -> None:
    alone, first, second = NEW
    for key, parent in ((alone, alone), (first, second), (second, first)):
        request = pb.ReserveRequest(
            namespace=INFO.fingerprint,
            keys=key,
            parent=parent,
            block_bytes=BLOCK_BYTES,
            session=evil.session,
        )
        lease = evil.stub.Reserve(request).lease
        evil.stub.Commit(pb.CommitRequest(session=evil.session, lease=lease), timeout=5.0)
    assert evil.lookup(INFO, NEW, lease_ms=0).present == 3
    evil.stub.Clear(pb.ClearRequest(), timeout=5.0)
    assert evil.lookup(INFO, NEW, lease_ms=0).present == 0
    evil.stub.Put(iter([header(evil), *body(KEYS)]))


def test_a_key_that_comes_twice_is_stored_once(evil: Raw, watcher: kvstore.Store) -> None:
    keys = chain("twice", 2)
    answer = evil.reserve(INFO, [keys[0], keys[1], keys[0], keys[1]])
    reserved, busy = pb.ReserveResponse.ANSWER_RESERVED, pb.ReserveResponse.ANSWER_BUSY
    assert list(answer.answers) == [reserved, reserved, busy, busy]
    evil.stub.Commit(pb.CommitRequest(session=evil.session, lease=answer.lease))
    assert evil.lookup(INFO, keys * 2, lease_ms=0).present == 4
    lease = evil.lookup(INFO, keys * 2).lease
    evil.stub.Release(pb.ReleaseRequest(session=evil.session, leases=[lease] * 3))
    assert control(watcher) == NOTHING_HELD


# -- usage

TRUE = {
    "requests": 1,
    "prompt": pb.BlockCount(tokens=32, blocks=2, bytes=2 * BLOCK_BYTES),
    "hits": [pb.Usage.Hits(tier=pb.TIER_CPU, count=pb.BlockCount(tokens=16, blocks=1))],
    "misses": [pb.Usage.Misses(reason=pb.MISS_REASON_TAIL, count=pb.BlockCount(tokens=16))],
}
COUNT = pb.BlockCount(tokens=16)

WRONG_USAGES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown tier": (
        {"hits": [pb.Usage.Hits(tier=9, count=COUNT)]},  # type: ignore[arg-type]
        "tier or reason 9 is unknown",
    ),
    "no tier": ({"hits": [pb.Usage.Hits(count=COUNT)]}, "tier or reason 0 is unknown"),
    "an unknown reason": (
        {"misses": [pb.Usage.Misses(reason=99, count=COUNT)]},  # type: ignore[arg-type]
        "tier or reason 99 is unknown",
    ),
    "an unknown skip": (
        {"skipped": [pb.Usage.Skips(reason=-5, count=COUNT)]},  # type: ignore[arg-type]
        "tier or reason -5 is unknown",
    ),
    "a tier twice": ({"hits": [*TRUE["hits"], *TRUE["hits"]]}, "given twice"),
    "more hits than prompt": (
        {"misses": []},
        "16 hit and 0 missed tokens are not the prompt's 32",
    ),
    "negative tokens": ({"output_tokens": -1}, "output_tokens is negative (-1)"),
    "negative requests": ({"requests": -1}, "requests is negative (-1)"),
    "negative stores": ({"stored": pb.BlockCount(blocks=-1)}, "stored.blocks is negative"),
    "not a number": ({"load_s": math.nan}, "seconds must be finite"),
    "infinite": ({"prefill_saved_s": -math.inf}, "seconds must be finite"),
    "negative time": ({"total_s": -0.5}, "total_s is negative"),
    "ten million years": ({"prefill_s": 1e300}, "prefill_s is too large"),
}


@pytest.mark.parametrize("case", WRONG_USAGES)
def test_usage_that_cannot_be_true_is_refused_whole(
    evil: Raw, refused: Callable[..., None], case: str
) -> None:
    fields, words = WRONG_USAGES[case]
    request = pb.RecordUsageRequest(
        namespace=INFO.fingerprint,
        usage=pb.Usage(**TRUE | fields),
        refused_keys=b"".join(chain(case, 2)),
        session=evil.session,
    )
    refused(INVALID, words, lambda: evil.stub.RecordUsage(request))
    found = evil.lookup(INFO, chain(case, 1), lease_ms=0)
    assert found.miss_reason == pb.MISS_REASON_NEVER_SEEN


def test_the_rest_of_a_usage_report_is_checked_before_it_counts(
    evil: Raw, refused: Callable[..., None]
) -> None:
    def record(**fields: Any) -> Callable[[], Any]:
        request = pb.RecordUsageRequest(
            namespace=INFO.fingerprint, usage=pb.Usage(**TRUE), session=evil.session, **fields
        )
        return lambda: evil.stub.RecordUsage(request)

    refused(INVALID, "33 bytes are not a whole number", record(refused_keys=bytes(33)))
    refused(INVALID, "gpu_used_bytes: negative", record(gpu_used_bytes=-1))
    refused(INVALID, "gpu_capacity_bytes", record(gpu_capacity_bytes=-1))


def test_a_request_that_is_no_message_at_all_is_an_error_of_that_call_alone(evil: Raw) -> None:
    with grpc.insecure_channel(evil.target) as channel:
        for method in ("Lookup", "Reserve", "Commit", "RecordUsage", "Nonsense"):
            call = channel.unary_unary(f"/kvstore.v1.KVStore/{method}")
            with pytest.raises(grpc.RpcError):
                call(b"\xff\xff\xff\xff", timeout=5.0)
    assert evil.lookup(INFO, KEYS, lease_ms=0).present == 4
