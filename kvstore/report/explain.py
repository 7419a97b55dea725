"""What engines decided, in words and numbers that a person can check.

A pure function of the decisions that the server keeps; see `kvstore.types.Decision`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from kvstore.report import words


def render(decisions: Sequence[Mapping[str, Any]], width: int) -> str:
    """Three lines a request, the latest first: what it was, what was loaded, what was stored."""
    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 60), highlight=False, markup=False, emoji=False, soft_wrap=True
    )
    if not decisions:
        console.print("No request has been decided on since the server started.")
    for one in decisions:
        console.print(Text(_head(one)))
        console.print(Text(f"  load   {_load(one)}"))
        console.print(Text(f"  store  {_store(one)}"))
    return out.getvalue()


def _head(one: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(one["at"], UTC)
    return (
        f"{at:%H:%M:%S} UTC, {words.plain(one['model'])} for {words.plain(one['tenant'])}: "
        f"{one['prompt_tokens']:,} tokens in, {one['output_tokens']:,} out, "
        f"prefill {_seconds(one['prefill_s'])}, in all {_seconds(one['total_s'])}"
    )


def _load(one: Mapping[str, Any]) -> str:
    found, loaded = one["found_tokens"], one["loaded_tokens"]
    if not found:
        return "nothing was found"
    text = (
        f"{loaded:,} of {found:,} found tokens: loading was expected to take "
        f"{_seconds(one['load_expected_s'])}, computing {_seconds(one['prefill_expected_s'])}"
    )
    if one["load_s"]:
        text += f"; it took {_seconds(one['load_s'])}"
    if one["load_reason"]:
        text += f". Not the rest ({one['load_reason']}): {words.MISSES[one['load_reason']]}"
    return text


def _store(one: Mapping[str, Any]) -> str:
    storable, stored = one["storable_tokens"], one["stored_tokens"]
    if not storable:
        return "nothing was new"
    expected_s = one["reuse"] * one["gain_s"]
    text = (
        f"{stored:,} of {storable:,} new tokens: whoever finds them saves "
        f"{_seconds(one['gain_s'])}, which is {one['reuse']:.0%} likely, so "
        f"{_seconds(expected_s)} expected"
    )
    if one["total_s"] > 0:
        text += f", {expected_s / one['total_s']:.1%} of the request's time"
    text += f", for {_seconds(one['cost_s'])} of waiting"
    if one["crowded"]:
        text += ". The arena is full of what is asked for more than new blocks"
    if one["skip_reason"]:
        text += f". Not the rest ({one['skip_reason']}): {words.SKIPS[one['skip_reason']]}"
    return text


def _seconds(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:,.0f} s"
