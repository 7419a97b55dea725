"""What crosses the wire: every error has a status, every reason a value, usage comes back."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.types import (
    BlockCount,
    BlockKey,
    Decision,
    MissReason,
    Outlook,
    SkipReason,
    TierName,
    Usage,
)
from kvstore.wire import convert
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.limits import KEYS_MAX
from kvstore.wire.status import CODES, code_of, error_of, metadata_of

NOT_SENT = {
    errors.KVStoreError: "the base",
    errors.RequestError: "a base",
    errors.BadTrace: "raised by replay, which asks no server",
    errors.ConfigError: "raised at the start, before there is a server",
    errors.UnsupportedModel: "raised by the engine's side alone",
}

ALL_ERRORS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, KVStoreError)
]

# -- errors and status codes


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_every_error_has_a_status_or_a_reason_why_it_is_never_sent(
    error: type[KVStoreError],
) -> None:
    assert (error in CODES) != (error in NOT_SENT), f"{error.__name__} is missing in a table"


def test_every_error_is_drawn_in_the_tree() -> None:
    for error in ALL_ERRORS:
        assert error.__name__ in (errors.__doc__ or "")


def test_no_mapped_error_becomes_an_internal_one() -> None:
    assert grpc.StatusCode.INTERNAL not in CODES.values()
    assert grpc.StatusCode.UNKNOWN not in CODES.values()


class FailedCall(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A call as a client sees it fail."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
    ):
        self._code = code
        self._details = details
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    add_callback = cancel = initial_metadata = is_active = time_remaining = _unused


@pytest.mark.parametrize("kind", list(CODES))
def test_an_error_arrives_as_the_same_one_with_the_same_words(kind: type[KVStoreError]) -> None:
    sent = kind("what went wrong")
    arrived = error_of(FailedCall(code_of(sent), str(sent), metadata_of(sent)))
    assert type(arrived) is kind
    assert str(arrived) == "what went wrong"


def test_a_message_that_grpc_refuses_for_its_size_arrives_as_too_many() -> None:
    call = FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max")
    assert type(error_of(call)) is errors.TooMany


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_arrives_as_an_error_of_ours(code: grpc.StatusCode) -> None:
    assert isinstance(error_of(FailedCall(code, "details")), KVStoreError)


# -- values


def test_every_tier_and_reason_has_a_value_of_its_own() -> None:
    for names, to_wire, from_wire in [
        (TierName, convert.TIER_TO_WIRE, convert.TIER_FROM_WIRE),
        (MissReason, convert.MISS_TO_WIRE, convert.MISS_FROM_WIRE),
        (SkipReason, convert.SKIP_TO_WIRE, convert.SKIP_FROM_WIRE),
    ]:
        assert set(to_wire) == set(names)
        assert 0 not in to_wire.values(), "0 stands for none"
        assert {from_wire[value]: value for value in to_wire.values()} == to_wire


def test_the_wire_has_no_value_without_a_name_here() -> None:
    assert len(pb.Tier.keys()) == len(TierName) + 1
    assert len(pb.MissReason.keys()) == len(MissReason) + 1
    assert len(pb.SkipReason.keys()) == len(SkipReason) + 1


COUNTS = st.builds(BlockCount, *[st.integers(0, 2**62)] * 3)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)
USAGES = st.builds(
    Usage,
    requests=st.integers(0, 2**62),
    prompt=COUNTS,
    output_tokens=st.integers(0, 2**62),
    hits=st.dictionaries(st.sampled_from(TierName), COUNTS),
    misses=st.dictionaries(st.sampled_from(MissReason), COUNTS),
    stored=COUNTS,
    already_present=COUNTS,
    skipped=st.dictionaries(st.sampled_from(SkipReason), COUNTS),
    prefill_saved_s=SECONDS,
    load_s=SECONDS,
    prefill_s=SECONDS,
    total_s=SECONDS,
)


@given(USAGES)
def test_usage_comes_back_as_it_was_sent(usage: Usage) -> None:
    sent = convert.usage_to_wire(usage).SerializeToString()
    assert convert.usage_from_wire(pb.Usage.FromString(sent)) == usage


NUMBERS = {"float": st.floats(0, 1e9), "int": st.integers(0, 1 << 40), "bool": st.booleans()}
DECISIONS = st.builds(
    Decision,
    **{
        field.name: NUMBERS[str(field.type)]
        for field in fields(Decision)
        if not field.name.endswith("reason")
    },
    load_reason=st.none() | st.sampled_from(MissReason),
    skip_reason=st.none() | st.sampled_from(SkipReason),
)


@given(DECISIONS)
def test_a_decision_comes_back_as_it_was_sent(decision: Decision) -> None:
    sent = convert.decision_to_wire(decision).SerializeToString()
    assert convert.decision_from_wire(pb.Decision.FromString(sent)) == decision


@given(st.lists(st.floats(0, 1), max_size=20), st.booleans())
def test_an_outlook_comes_back_to_a_part_in_255(reuse: list[float], crowded: bool) -> None:
    sent = convert.outlook_to_wire(Outlook(reuse, crowded, 0.5, 2e9)).SerializeToString()
    back = convert.outlook_from_wire(pb.Outlook.FromString(sent))
    assert back.reuse == pytest.approx(reuse, abs=1 / 255)
    assert (back.far_latency_s, back.far_bytes_per_s) == (0.5, 2e9)
    assert back.crowded is crowded


def test_usage_with_a_reason_twice_or_of_another_version_is_refused() -> None:
    hit = pb.Usage.Hits(tier=pb.TIER_CPU)
    with pytest.raises(InvalidRequest, match="twice"):
        convert.usage_from_wire(pb.Usage(hits=[hit, hit]))
    with pytest.raises(InvalidRequest, match="99"):
        convert.usage_from_wire(pb.Usage(misses=[pb.Usage.Misses(reason=99)]))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="0 is unknown"):
        convert.usage_from_wire(pb.Usage(skipped=[pb.Usage.Skips()]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_usage_with_seconds_that_are_no_number_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        convert.usage_from_wire(pb.Usage(load_s=value))


# -- keys


@given(st.lists(st.binary(min_size=32, max_size=32).map(BlockKey), min_size=1, max_size=20))
def test_keys_come_back_in_order(keys: list[BlockKey]) -> None:
    assert convert.split_keys(convert.join_keys(keys)) == keys


@pytest.mark.parametrize("size", [0, 1, 31, 33, 32 * (KEYS_MAX + 1)])
def test_joined_keys_of_a_wrong_length_are_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match="keys"):
        convert.split_keys(bytes(size))


def test_keys_of_a_wrong_length_are_not_sent_even_if_they_add_up() -> None:
    with pytest.raises(InvalidRequest):
        convert.join_keys([BlockKey(bytes(31)), BlockKey(bytes(33))])
    with pytest.raises(InvalidRequest):
        convert.join_keys([BlockKey(bytes(32))] * (KEYS_MAX + 1))


def test_a_parent_may_be_left_out_but_not_be_of_another_length() -> None:
    assert convert.to_parent(b"") is None
    assert convert.to_parent(bytes(32)) == bytes(32)
    for size in (1, 31, 33):
        with pytest.raises(InvalidRequest):
            convert.to_parent(bytes(size))
        with pytest.raises(InvalidRequest):
            convert.to_fingerprint(bytes(size))
    with pytest.raises(InvalidRequest):
        convert.to_fingerprint(b"")
