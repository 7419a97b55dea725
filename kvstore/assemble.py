"""The composition root: a `Config` in, a server whose parts fit together out."""

from __future__ import annotations

import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvstore
from kvstore.arena import Arena, remove_stale
from kvstore.clock import SystemClock
from kvstore.config import Config
from kvstore.demand import Demand
from kvstore.embedded import SOCKET_PATH_CHARS_MAX, EmbeddedValkey
from kvstore.errors import ConfigError
from kvstore.eviction import DEFAULT, POLICIES
from kvstore.history import History
from kvstore.host import GIB, choose_arena_bytes
from kvstore.index import Block
from kvstore.leases import Leases
from kvstore.outbox import Outbox
from kvstore.pace import Pace
from kvstore.report.board import Board
from kvstore.server import Server, check_free
from kvstore.service import Identity, Service
from kvstore.store import Store
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.redis import RedisTier, connect
from kvstore.types import MissReason, TierName
from kvstore.watch import EventKind, Watchers

log = logging.getLogger("kvstore")

REDIS_BYTES_DEFAULT = 16 * GIB
WORKERS = 4
OUTBOX_SHARE = 4
"""Blocks that wait to be written through are pinned; they may pin one part in so many of the
arena, so that new blocks always find room."""


def assemble(config: Config) -> Server:
    """Takes the memory, starts the embedded Valkey, and puts the parts together.

    Call within the event loop that will run the server.

    Raises:
        ConfigError: the host can't do what the configuration asks; nothing is left running.
    """
    config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    socket = config.state_dir / "kvstore.sock"
    if len(str(socket)) > SOCKET_PATH_CHARS_MAX:
        raise ConfigError(f"state_dir: {socket} is too long for a unix socket; use a shorter one")
    check_free(socket)  # before its Valkey is taken over
    clock, chance = SystemClock(), random.SystemRandom()
    epoch = chance.getrandbits(63) | 1
    prefix = f"kvstore-{os.getuid()}-"
    for stale in remove_stale(config.shm_dir, prefix):
        log.info("removed %s, which a killed server had left", stale)
    arena_bytes = choose_arena_bytes(config.cpu_bytes, config.shm_dir)
    arena = Arena(config.shm_dir / f"{prefix}{epoch:016x}.arena", arena_bytes, epoch)
    embedded = None
    try:
        history, watchers = History(clock), Watchers()
        demand, pace = Demand(clock, arena.capacity_bytes), Pace()
        executor = ThreadPoolExecutor(WORKERS, thread_name_prefix="kvstore-worker")
        kept_s = None if config.no_redis else config.redis_ttl_s

        def on_evicted(block: Block) -> None:
            history.note([block.key], MissReason.EVICTED, kept_s)
            fingerprint = block.namespace.info.fingerprint
            watchers.publish(EventKind.EVICTED, fingerprint, [block.key], TierName.CPU)

        cpu = CpuTier(arena, lambda: POLICIES[DEFAULT](clock), on_evicted)
        remote = outbox = None
        if not config.no_redis:
            redis_bytes = config.redis_bytes
            url = config.redis_url
            if url == "embedded":
                redis_bytes = redis_bytes or arena.capacity_bytes
                embedded = EmbeddedValkey(config.state_dir / "valkey", redis_bytes)
                embedded.start()
                url = embedded.url
            remote = RedisTier(
                connect(url), redis_bytes or REDIS_BYTES_DEFAULT, config.redis_ttl_s, clock
            )
            queue_bytes_max = arena.capacity_bytes // OUTBOX_SHARE
            outbox = Outbox(cpu, remote, executor, queue_bytes_max, pace, clock)
        store = Store(
            cpu,
            remote,
            outbox,
            Leases(clock, chance),
            history,
            watchers,
            clock,
            executor,
            demand,
            pace,
            verify_always=config.verify == "always",
        )
        targets = [f"unix:{socket}"]
        if config.listen != "none":
            targets.append(config.listen)
        arena_path = str(arena.path) if config.share_arena else ""
        board = Board(store, clock, kvstore.__version__, epoch, targets, lambda: service.calls)
        service = Service(
            store, board, Identity(epoch, kvstore.__version__, arena_path, arena.mapping_bytes)
        )
        return Server(
            service,
            store,
            board,
            arena,
            embedded,
            executor,
            targets,
            None if config.metrics == "none" else config.metrics,
            config.drain_s,
        )
    except BaseException:
        arena.close()
        if embedded is not None:
            embedded.stop(config.drain_s)
        raise


def default_target(state_dir: Path) -> str:
    """Where a server with this state folder listens."""
    return f"unix:{state_dir / 'kvstore.sock'}"
