"""What requests ask a server for, as it comes: for recorders and for samplers.

Knows nothing of what is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import grpc

from kvstore.client.store import Store
from kvstore.types import BlockKey, Fingerprint
from kvstore.wire import convert
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.status import error_of


class Asked(NamedTuple):
    """One request's lookup."""

    namespace: Fingerprint
    keys: list[BlockKey]


def asked(
    store: Store, namespace: bytes | None = None, timeout_s: float | None = None
) -> Iterator[Asked]:
    """The lookups from now on, of one namespace or of all; ends after `timeout_s`.

    Raises, while iterated:
        Unavailable: the server is not there, or has gone.
        FellBehind: too many lookups waited to be read.
        InvalidRequest: the namespace is no fingerprint.
    """
    call = store._stub.Watch(
        pb.WatchRequest(namespace=namespace or b"", asked=True), timeout=timeout_s
    )
    try:
        for event in call:
            yield Asked(Fingerprint(event.namespace), convert.split_keys(event.keys))
    except grpc.RpcError as error:
        late = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if not late or timeout_s is None:
            raise error_of(error) from error
    finally:
        call.cancel()  # type: ignore[no-untyped-call]
