"""Whatever changes a block's KV changes its key: adapter, salt, images and where they stand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from engine.hashing import block_keys
from engine.plugins.vllm.extras import Adapters, extras_of, has_known_identity
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


def test_only_what_is_named_by_its_content_has_a_known_identity() -> None:
    def known(**options: Any) -> bool:
        request = Request("r", list(TOKENS), SamplingParams(max_tokens=1), None, **options)
        return has_known_identity(request)

    assert known()
    assert known(cache_salt="a")
    assert known(mm_features=[image("0f" * 32, 70)])
    # A client's own name, and vLLM's count of images when it does not hash them.
    assert not known(mm_features=[image("0f" * 32, 10), image("my-cat", 70)])
    assert not known(mm_features=[image("renderer0-mm-1-image-0", 70)])


def test_an_adapter_is_known_only_by_files_from_before_the_engine_started(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    adapter = LoRARequest("one", 1, str(folder))
    later_s = time.time() + 60

    assert not Adapters(time.time() - 60).is_known(adapter)
    assert not Adapters(later_s).is_known(LoRARequest("hub", 2, "somebody/adapter"))

    adapters = Adapters(later_s)
    assert adapters.is_known(adapter)
    first = adapters.digest(adapter)
    assert adapters.is_known(adapter)
    # Same size, and the time set back.
    times = weights.stat()
    weights.write_bytes(b"other")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not adapters.is_known(adapter)

    assert Adapters(later_s).digest(adapter) != first
    weights.write_bytes(b"first")
    assert Adapters(later_s).digest(adapter) == first


def test_a_folder_that_is_a_link_to_another_one_is_noticed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "one")
    adapters = Adapters(time.time() + 60)
    adapter = LoRARequest("current", 1, str(current))
    assert adapters.is_known(adapter)
    current.unlink()
    current.symlink_to(tmp_path / "two")
    assert not adapters.is_known(adapter)


def test_the_adapter_is_in_every_block() -> None:
    request = Request("r", list(TOKENS), SamplingParams(max_tokens=1), None)
    assert extras_of(request, 200, 64, adapter=b"digest") == {
        block: [b"digest"] for block in range(3)
    }
