"""What goes wrong on the way costs a recompute, and never an answer."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import redis

from kvstore.client import Store
from kvstore.testing import ServerProcess

from .conftest import Engine, cached_of, settled_report, tokens_of

ALWAYS = {"load": "always", "store": "always"}


def test_a_byte_flipped_in_valkey_is_computed_again(server: ServerProcess, text: list[int]) -> None:
    prompt = text[:700]
    with Engine(server.target, extra=ALWAYS) as engine:
        expected = tokens_of(engine.generate(prompt))
        settled_report(server, 1)
        with Store(server.target) as store:
            assert store.wait_attached(20)
            store.clear(arena_only=True)
        socket = server.folder / "valkey" / "valkey.sock"
        with redis.Redis(unix_socket_path=str(socket)) as client:
            names = [name for name in client.scan_iter() if b"ledger" not in name]
            assert len(names) == 11
            for name in names[3:5]:
                value = bytearray(client.get(name))
                value[1000] ^= 1
                client.set(name, bytes(value), keepttl=True)
        damaged = engine.generate(prompt)
        assert tokens_of(damaged) == expected
        assert engine.ask("state")["failed_loads"] == 1
        # What was damaged was stored again.
        assert tokens_of(engine.generate(prompt)) == expected
        assert engine.ask("state")["failed_loads"] == 1
    report = settled_report(server, 3)
    misses = report["totals"]["misses"]
    hits = sum(hit["tokens"] for hit in report["totals"]["hits"].values())
    assert misses["corrupt"]["tokens"] >= 64
    assert hits == 2 * 640 - misses["corrupt"]["tokens"]


def test_of_a_prompt_that_is_aborted_half_way_only_whole_blocks_are_stored(
    server: ServerProcess, text: list[int]
) -> None:
    # Two blocks and a little; after one chunk, the second block has its pages, half computed.
    prompt = text[:130]
    with Engine() as plain:
        expected = tokens_of(plain.generate(prompt))
    with Engine(server.target, extra=ALWAYS, max_num_batched_tokens=100, max_num_seqs=4) as engine:
        assert engine.ask("abort", prompt=prompt, steps=1) == 100
        again = engine.generate(prompt)
        assert (cached_of(again), tokens_of(again)) == ([64], expected)
        again = engine.generate(prompt)
        assert (cached_of(again), tokens_of(again)) == ([128], expected)


def test_a_server_that_is_killed_and_comes_back(text: list[int]) -> None:
    """Killed at any time: before a lookup, during a load, during a store."""
    chance = random.Random(2)
    prompts = [text[start : start + 900] for start in range(0, 500, 100)]
    with tempfile.TemporaryDirectory(prefix="kvv") as folder:
        # Streams, so that loads take their time.
        server = ServerProcess(Path(folder), "--share-arena=false", cpu_bytes="512MiB")
        with Engine() as plain:
            expected = tokens_of(plain.generate(*prompts))
        # At first no server is there at all.
        with Engine(server.target, extra=ALWAYS) as engine:
            assert tokens_of(engine.generate(*prompts)) == expected
            with server:
                for _ in range(8):
                    with Store(server.target) as store:
                        assert store.wait_attached(20)
                    time.sleep(1.5)  # until the engine is attached, too
                    assert tokens_of(engine.generate(*prompts)) == expected
                    engine.tell(
                        "generate",
                        prompts=[{"prompt_token_ids": prompt} for prompt in prompts],
                        max_tokens=8,
                    )
                    time.sleep(chance.uniform(0.0, 0.5))
                    server.kill()
                    assert tokens_of(engine.answer()) == expected
                    server.restart()
                    if engine.ask("state")["failed_loads"]:
                        break
                assert engine.ask("state")["failed_loads"] > 0
                with Store(server.target) as store:
                    assert store.wait_attached(20)
                time.sleep(1.5)
                engine.generate(*prompts)
                assert cached_of(engine.generate(*prompts)) == [896] * len(prompts)
                state = engine.ask("state")
                assert (state["requests"], state["tracked"]) == (0, 0)
                settled_report(server, 1)
            warnings = [line for line in engine.output().splitlines() if "kvstore" in line]
            assert sum("no kvstore server" in line for line in warnings) == 1


def test_after_a_reset_the_engine_goes_without_the_store(
    server: ServerProcess, text: list[int]
) -> None:
    """Its weights may have changed; what is stored stays right for engines with the files."""
    prompt = text[:300]
    with Engine(server.target, extra=ALWAYS) as engine:
        expected = tokens_of(engine.generate(prompt))
        assert cached_of(engine.generate(prompt)) == [256]
        assert engine.ask("reset", reset_connector=True)
        assert cached_of(engine.generate(prompt, text[400:800])) == [0, 0]
        state = engine.ask("state")
        assert (state["requests"], state["tracked"]) == (0, 0)
    with Engine(server.target, extra=ALWAYS) as fresh:
        both = fresh.generate(prompt, text[400:800])
        assert cached_of(both) == [256, 0]
        assert tokens_of(both)[:1] == expected


def test_a_server_that_hangs_delays_no_more_than_a_lookup_may(
    server: ServerProcess, text: list[int]
) -> None:
    prompt = text[:500]
    with Engine(server.target, extra=ALWAYS) as engine:
        expected = tokens_of(engine.generate(prompt))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                hung = engine.generate(prompt, drain=False)
                assert (tokens_of(hung), cached_of(hung)) == (expected, [0])
        finally:
            os.kill(server.pid, signal.SIGCONT)
        # The second one did not wait: the lookup was under way, or the server counted as away.
        state = engine.ask("state")
        assert state["misses"]["too_slow"] >= 448
        assert state["misses"]["too_slow"] + state["misses"].get("server_down", 0) == 2 * 448
