"""What one engine process stored, another one loads: the same answers, fewer tokens computed."""

from __future__ import annotations

from kvstore.client import Store
from kvstore.testing import ServerProcess

from .conftest import BLOCK_TOKENS, Engine, cached_of, settled_report, tokens_of


def test_a_fresh_process_loads_what_another_stored(server: ServerProcess, text: list[int]) -> None:
    # A prompt shorter than a block, of exactly one and two, one token more, and long ones.
    prompts = [text[:n] for n in (40, 64, 65, 129, 500)]
    prompts.append(text[100:900])
    salted = [
        {"prompt_token_ids": text[:300], "cache_salt": "a"},
        {"prompt_token_ids": text[:300], "cache_salt": "b"},
    ]
    with Engine() as plain:
        expected = tokens_of(plain.generate(*prompts, max_tokens=70))
        expected_salted = tokens_of(plain.generate(*salted))
    with Engine(server.target, extra={"load": "always", "store": "always"}) as first:
        # One by one, so that each finds what the one before it stored.
        cold = [answer for prompt in prompts for answer in first.generate(prompt, max_tokens=70)]
        assert tokens_of(cold) == expected
        assert cached_of(cold) == [0, 0, 64, 64, 128, 0]
        assert tokens_of(first.generate(salted[0])) == expected_salted[:1]
    with Engine(server.target, extra={"load": "always", "store": "always"}) as second:
        warm = second.generate(*prompts, max_tokens=70)
        assert tokens_of(warm) == expected
        loadable = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
        assert cached_of(warm) == loadable
        # The answers were stored too, so a chat's next turn begins where this one ended.
        turn = [*prompts[4], *expected[4], *text[:20]]
        stored = (len(prompts[4]) + 69) // BLOCK_TOKENS * BLOCK_TOKENS
        assert cached_of(second.generate(turn)) == [stored]

        # Another salt is another prompt; the same one is the same.
        assert cached_of(second.generate(salted[1])) == [0]
        again = second.generate(salted[0])
        assert (cached_of(again), tokens_of(again)) == ([256], expected_salted[:1])

        with Store(server.target) as store:
            assert store.wait_attached(20)
            dropped, _ = store.clear(arena_only=True)
            assert dropped > 0
        far = second.generate(*prompts, max_tokens=70)
        assert (tokens_of(far), cached_of(far)) == (expected, loadable)
        state = second.ask("state")
        assert (state["requests"], state["tracked"]) == (0, 0)

    # Our own counters say that it was so.
    report = settled_report(server, 3 * len(prompts) + 4)
    hits = {tier: hit["tokens"] for tier, hit in report["totals"]["hits"].items()}
    assert hits["redis"] >= max(loadable)
    assert sum(hits.values()) == sum(cached_of(cold)) + 2 * sum(loadable) + stored + 256
    assert report["totals"]["misses"].keys() == {"never_seen", "tail"}
    assert report["control"]["leases"] == 0
    assert report["control"]["reserved_slots"] == 0


def test_a_request_may_override_both_decisions(server: ServerProcess, text: list[int]) -> None:
    prompt = text[:300]
    with Engine(server.target, extra={"load": "always", "store": "always"}) as engine:

        def cached(**params: object) -> list[int]:
            return cached_of(engine.generate(prompt, params={"kvstore": params}))

        expected = tokens_of(engine.generate(prompt, params={"kvstore": {"store": "never"}}))
        assert cached(store="always") == [0]
        assert cached(load="never") == [0]
        # What can't be understood is not guessed.
        assert cached(load="sometimes") == [0]
        assert cached(laod="always") == [0]
        again = engine.generate(prompt)
        assert (cached_of(again), tokens_of(again)) == ([256], expected)
        assert "did you mean load" in engine.output()
    skipped = settled_report(server, 6)["totals"]["skipped"]
    assert skipped["by_request"]["blocks"] == 3 * 4
