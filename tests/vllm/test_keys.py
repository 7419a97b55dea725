"""Whatever changes a block's KV changes its key: adapter, salt, images and where they stand."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from engine.hashing import block_keys
from engine.plugins.vllm.scheduler import extras_of
from kvstore.types import Fingerprint

TOKENS = list(range(200))


def keys_of(**options: Any) -> list[bytes]:
    request = Request("r", list(TOKENS), SamplingParams(max_tokens=1), None, **options)
    return list(block_keys(Fingerprint(bytes(32)), TOKENS, 64, extras_of(request, len(TOKENS), 64)))


def image(name: str, offset: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=offset, length=20),
    )


def test_a_plain_prompt_has_no_extras() -> None:
    assert keys_of() == block_keys(Fingerprint(bytes(32)), TOKENS, 64)


def test_a_salt_changes_all_keys() -> None:
    plain, a, b = keys_of(), keys_of(cache_salt="a"), keys_of(cache_salt="b")
    assert not set(plain) & set(a) | set(a) & set(b)
    assert a == keys_of(cache_salt="a")


def test_an_adapter_changes_all_keys_and_so_does_its_path() -> None:
    def adapted(name: str, path: str) -> list[bytes]:
        return keys_of(lora_request=LoRARequest(name, 1, path))

    known = [keys_of(), adapted("one", "/one"), adapted("two", "/one"), adapted("one", "/two")]
    assert len({keys[0] for keys in known}) == 4


def test_an_image_changes_the_keys_from_its_block_on() -> None:
    plain, cat = keys_of(), keys_of(mm_features=[image("cat", 70)])
    assert [a == b for a, b in zip(plain, cat, strict=True)] == [True, False, False]
    assert cat != keys_of(mm_features=[image("dog", 70)])
    assert cat[1] != keys_of(mm_features=[image("cat", 71)])[1]
    # One that reaches into the next block changes that one too, by itself.
    reaching = keys_of(mm_features=[image("cat", 120)])
    assert reaching[1] != plain[1]
    assert reaching[2] != plain[2]


def test_extras_from_a_later_block_on_are_the_same() -> None:
    images = [image("cat", 10), image("dog", 120)]
    request = Request("r", list(TOKENS), SamplingParams(max_tokens=1), None, mm_features=images)
    whole = extras_of(request, 200, 64)
    assert set(whole) == {0, 1, 2}
    assert extras_of(request, 200, 64, first=1) == {block: whole[block] for block in (1, 2)}
