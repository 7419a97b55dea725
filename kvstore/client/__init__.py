"""The client: lookups, loads and stores over whichever data plane fits. See `connect`."""

from kvstore.client.planes import Sink, Source, Stored
from kvstore.client.store import Found, Loaded, Namespace, Store, connect

__all__ = ["Found", "Loaded", "Namespace", "Sink", "Source", "Store", "Stored", "connect"]
