"""Wrong stores and wrong usage are refused with a message that helps, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvstore
from kvstore import codec
from kvstore.testing import ServerProcess
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.integration.support import (
    BLOCK_BYTES,
    NOTHING_HELD,
    Raw,
    chain,
    content,
    control,
    raw,
)
from tests.integration.wrong import (
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

# -- storing


@pytest.mark.parametrize("size", [0, -1, BLOCK_BYTES - 1, BLOCK_BYTES * 2, 1 << 40])
def test_a_size_that_is_not_the_namespaces_is_refused(
    evil: Raw, refused: Callable[..., None], size: int
) -> None:
    words = f"blocks of {size} bytes, but this namespace's have {BLOCK_BYTES}"
    reserve = pb.ReserveRequest(namespace=INFO.fingerprint, keys=JOINED, block_bytes=size)
    refused(INVALID, words, lambda: evil.stub.Reserve(reserve))
    refused(INVALID, words, lambda: evil.stub.Put(iter([header(evil, block_bytes=size)])))


def test_a_parent_of_the_wrong_length_is_refused(evil: Raw, refused: Callable[..., None]) -> None:
    words = "parent: 31 bytes; a key has 32, or is left out"
    reserve = pb.ReserveRequest(
        namespace=INFO.fingerprint,
        keys=b"".join(NEW),
        parent=bytes(31),
        block_bytes=BLOCK_BYTES,
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
    ids = {"lease": lease}
    refused(INVALID, words, lambda: evil.stub.Commit(pb.CommitRequest(**ids, **fields)))
    assert evil.lookup(INFO, keys, lease_ms=0).present == 0
    assert evil.stub.Commit(pb.CommitRequest(**ids, failed=[2])).committed == 2
    assert evil.lookup(INFO, keys, lease_ms=0).present == 2


def test_a_lease_can_be_committed_once(evil: Raw, refused: Callable[..., None]) -> None:
    lease = evil.reserve(INFO, chain("once", 1)).lease
    ids = {"lease": lease}
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
        ids = {"lease": lease}
        with pytest.raises(grpc.RpcError, match="commit needs checksums") as caught:
            client.stub.Commit(pb.CommitRequest(**ids))
        assert caught.value.code() is PRECONDITION
        assert client.lookup(INFO, KEYS, lease_ms=0).present == 0
        client.stub.Abort(pb.AbortRequest(**ids))


def test_blocks_that_follow_themselves_do_not_stop_the_server(evil: Raw) -> None:
    first, second, _ = NEW
    for key, parent in ((first, second), (second, first)):
        request = pb.ReserveRequest(
            namespace=INFO.fingerprint,
            keys=key,
            parent=parent,
            block_bytes=BLOCK_BYTES,
        )
        lease = evil.stub.Reserve(request).lease
        evil.stub.Commit(pb.CommitRequest(lease=lease))
    assert evil.lookup(INFO, NEW, lease_ms=0).present == 2
    evil.stub.Clear(pb.ClearRequest(), timeout=5.0)
    assert evil.lookup(INFO, NEW, lease_ms=0).present == 0
    evil.stub.Put(iter([header(evil), *body(KEYS)]))


@pytest.mark.parametrize("parent", [b"", NEW[0]], ids=["twice among the keys", "also the parent"])
def test_a_key_that_comes_twice_in_a_store_is_refused(
    evil: Raw, watcher: kvstore.Store, parent: bytes
) -> None:
    request = pb.ReserveRequest(
        namespace=INFO.fingerprint,
        keys=b"".join([NEW[0], NEW[1]] if parent else [NEW[0], NEW[1], NEW[0]]),
        parent=parent,
        block_bytes=BLOCK_BYTES,
    )
    with pytest.raises(grpc.RpcError, match="the same key twice") as refused:
        evil.stub.Reserve(request)
    assert refused.value.code() is INVALID
    assert control(watcher) == NOTHING_HELD


def test_a_key_that_comes_twice_in_a_lookup_is_found_twice(
    evil: Raw, watcher: kvstore.Store
) -> None:
    keys = chain("twice", 2)
    answer = evil.reserve(INFO, keys)
    evil.stub.Commit(pb.CommitRequest(lease=answer.lease))
    assert evil.lookup(INFO, keys * 2, lease_ms=0).present == 4
    lease = evil.lookup(INFO, keys * 2).lease
    evil.stub.Release(pb.ReleaseRequest(leases=[lease] * 3))
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
