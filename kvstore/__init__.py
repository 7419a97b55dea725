"""kvstore: a KV-cache offload and reuse service for LLM inference.

>>> import kvstore
>>> store = kvstore.connect()          # the server on this host; see `kvstore serve`
>>> namespace = store.open(info)       # what the blocks are: engine.layout makes the info
>>> found = namespace.lookup(keys)     # the longest present prefix, pinned
>>> namespace.load(found, sink)        # copies it
>>> namespace.store(keys, source)      # keeps what is new
"""

from kvstore.client import Store, connect
from kvstore.errors import KVStoreError
from kvstore.types import BlockKey, Fingerprint, MissReason, NamespaceInfo, SkipReason, TierName

__version__ = "0.1.0"

__all__ = [
    "BlockKey",
    "Fingerprint",
    "KVStoreError",
    "MissReason",
    "NamespaceInfo",
    "SkipReason",
    "Store",
    "TierName",
    "__version__",
    "connect",
]
