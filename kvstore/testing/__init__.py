"""For tests of kvstore, and of plugins for it: a clock that is set by hand, a real server."""

from kvstore.testing.clock import FakeClock
from kvstore.testing.server import ServerProcess

__all__ = ["FakeClock", "ServerProcess"]
