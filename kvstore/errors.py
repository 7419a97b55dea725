"""Every exception that kvstore raises on purpose.

    KVStoreError
    ├── ConfigError          a setting is unknown, unparsable or can't be met on this host
    ├── RequestError         the caller asked for something wrong; nothing was changed
    │   ├── InvalidRequest   malformed: a key of the wrong length, a negative offset, too many keys
    │   ├── UnknownNamespace the namespace was not opened since the server started
    │   ├── UnknownLease     the lease or session has expired, was released, or never existed
    │   ├── NamespaceConflict the namespace is open with another block size
    │   ├── ChecksumRequired a commit without checksums, to a server that verifies always
    │   ├── TooMany          a bound on sessions, leases or message size is reached
    │   └── FellBehind       a watcher read too slowly; what it saw before is no longer the truth
    ├── BadTrace             a trace can't be read or replayed; the message names file and line
    ├── Unavailable          the server can't be reached, or did not answer by the deadline
    └── UnsupportedModel     the engine's KV layout can't be stored; the message names why

Expected outcomes (a miss, a refused store, a full tier) are values in `kvstore.types`, not
exceptions. `kvstore.wire.status` maps this tree to gRPC status codes, in one table.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors raised by kvstore."""


class ConfigError(KVStoreError):
    """A setting is unknown, unparsable, or can't be met on this host."""


class BadTrace(KVStoreError):
    """A trace can't be read or replayed; the message names the file and the line."""


class RequestError(KVStoreError):
    """The caller asked for something wrong; nothing was changed."""


class InvalidRequest(RequestError):
    """The request is malformed."""


class UnknownNamespace(RequestError):
    """The namespace was not opened since the server started."""


class UnknownLease(RequestError):
    """The lease or session has expired, was released, or never existed."""


class NamespaceConflict(RequestError):
    """The namespace is already open with another block size or block length."""


class ChecksumRequired(RequestError):
    """The server verifies always, so a commit needs the checksums of its blocks."""


class TooMany(RequestError):
    """A bound on sessions, leases or message size is reached."""


class FellBehind(RequestError):
    """A watcher read too slowly; what it saw before is no longer the truth."""


class Unavailable(KVStoreError):
    """The server can't be reached, or did not answer by the deadline."""


class UnsupportedModel(KVStoreError):
    """The engine's KV layout can't be stored; the message names why."""
