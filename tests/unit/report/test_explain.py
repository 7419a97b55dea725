"""The words of `kvstore explain`."""

from __future__ import annotations

from typing import Any

from kvstore.report import explain

LOADED: dict[str, Any] = {
    "at": 0.0, "model": "smollm", "tenant": "default",
    "prompt_tokens": 1100, "output_tokens": 20, "found_tokens": 1024, "loaded_tokens": 1024,
    "load_reason": None, "load_expected_s": 0.05, "prefill_expected_s": 1.46, "load_s": 0.061,
    "prefill_s": 0.12, "total_s": 0.8, "storable_tokens": 64, "stored_tokens": 64,
    "skip_reason": None, "reuse": 0.25, "gain_s": 0.08, "cost_s": 0.0005, "crowded": False,
}  # fmt: skip


def lines_of(**changes: Any) -> list[str]:
    return explain.render([{**LOADED, **changes}], 100).splitlines()


def test_a_request_is_three_lines_whose_numbers_add_up() -> None:
    assert lines_of() == [
        "00:00:00 UTC, smollm for default: 1,100 tokens in, 20 out, prefill 0.12 s, in all 0.80 s",
        "  load   1,024 of 1,024 found tokens: loading was expected to take 50 ms, computing "
        "1.46 s; it took 61 ms",
        "  store  64 of 64 new tokens: whoever finds them saves 80 ms, which is 25% likely, so "
        "20 ms expected, 2.5% of the request's time, for 0.5 ms of waiting",
    ]


def test_what_was_not_done_has_its_reason() -> None:
    _, load, store = lines_of(
        loaded_tokens=0, load_reason="not_worth_loading", load_s=0.0,
        stored_tokens=0, skip_reason="displaces_more", crowded=True,
    )  # fmt: skip
    assert "0 of 1,024 found tokens" in load
    assert "(not_worth_loading)" in load
    assert "0 of 64 new tokens" in store
    assert "The arena is full" in store
    assert "(displaces_more)" in store


def test_where_nothing_was_to_be_decided_it_says_so() -> None:
    _, load, store = lines_of(found_tokens=0, storable_tokens=0)
    assert load == "  load   nothing was found"
    assert store == "  store  nothing was new"
    assert "No request" in explain.render([], 80)


def test_names_from_clients_cannot_steer_the_terminal() -> None:
    head, *_ = lines_of(model="\x1b[2Jevil\nname", tenant="\x07")
    assert "\x1b" not in head
    assert len(lines_of(model="two\nlines")) == 3
