"""Ranks, latent attention and adapters are kept apart; what can't be served is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kvstore.testing import ServerProcess
from scripts.vllm_engine import PAGE_TOKENS, EngineFailed

from .conftest import Engine, cached_of, settled_report, tokens_of

ALWAYS = {"load": "always", "store": "always"}


def prompts_of(lengths: list[int]) -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(3, 500) for _ in range(length)] for length in lengths]


def test_two_ranks_store_and_load_their_shards(server: ServerProcess, tmp_path: Path) -> None:
    from . import tiny

    tiny_settings = {
        "model": str(tiny.llama(tmp_path / "llama")),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
    }
    two = {
        **tiny_settings,
        "tensor_parallel_size": 2,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    prompts = prompts_of([300, 128, 700])
    with Engine(server.target, extra=ALWAYS, **two) as first:
        cold = first.generate(*prompts)
        assert cached_of(cold) == [0, 0, 0]
        expected = tokens_of(cold)
    with Engine(server.target, extra=ALWAYS, **two) as second:
        warm = second.generate(*prompts)
        assert (tokens_of(warm), cached_of(warm)) == (expected, [256, 64, 640])
    # One rank alone is another engine: its shards are no one else's.
    with Engine(server.target, extra=ALWAYS, **tiny_settings) as single:
        assert cached_of(single.generate(*prompts)) == [0, 0, 0]
    report = settled_report(server, 9)
    assert report["totals"]["hits"]["cpu"]["tokens"] == 960
    assert len(report["namespaces"]) == 3


def test_latent_attention_is_served(server: ServerProcess, tmp_path: Path) -> None:
    """In bfloat16, the only type of its kernel here. A split prefill rounds differently there, so
    loaded KV is compared with vLLM's own prefix cache, split at the same token.
    """
    from . import tiny

    settings = {
        "model": str(tiny.deepseek_with_latents(tmp_path / "deepseek")),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "enable_prefix_caching": True,
        "extra": {**ALWAYS, "block_tokens": PAGE_TOKENS},
    }
    prompts = prompts_of([300, 128, 700])
    with Engine(server.target, **settings) as first:
        for prompt in prompts:
            assert cached_of(first.generate(prompt)) == [0]
        own = [first.generate(prompt)[0] for prompt in prompts]
        assert cached_of(own) == [288, 96, 672]
    with Engine(server.target, **settings) as second:
        loaded = [second.generate(prompt)[0] for prompt in prompts]
    assert (tokens_of(loaded), cached_of(loaded)) == (tokens_of(own), cached_of(own))
    report = settled_report(server, 9)
    assert report["totals"]["hits"]["cpu"]["tokens"] == 288 + 96 + 672
    assert report["totals"]["hits"]["gpu"]["tokens"] == 288 + 96 + 672


def test_sliding_windows_are_refused(server: ServerProcess, tmp_path: Path) -> None:
    from . import tiny

    model = tiny.mistral_with_windows(tmp_path / "mistral")
    with (
        pytest.raises(EngineFailed, match=r"SlidingWindowSpec.*kvstore serves full attention"),
        Engine(server.target, model=str(model), skip_tokenizer_init=True, max_model_len=1024),
    ):
        pass


def test_an_unknown_setting_is_refused_with_the_nearest_one(
    server: ServerProcess, tmp_path: Path
) -> None:
    from . import tiny

    model = tiny.llama(tmp_path / "llama")
    with (
        pytest.raises(EngineFailed, match="no 'block_token'; did you mean block_tokens"),
        Engine(
            server.target,
            extra={"block_token": 64},
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=1024,
        ),
    ):
        pass


def test_adapters_never_hit_each_other(
    server: ServerProcess, tmp_path: Path, text: list[int]
) -> None:
    from . import tiny

    one = ["one", 1, str(tiny.adapter(tmp_path / "one", 1))]
    two = ["two", 2, str(tiny.adapter(tmp_path / "two", 2))]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    prompt = text[:300]
    with Engine(server.target, extra=ALWAYS, **settings) as engine:
        answers = []
        for lora in (None, one, two):
            cold = engine.generate(prompt, lora=lora)
            assert cached_of(cold) == [0]
            warm = engine.generate(prompt, lora=lora)
            assert (tokens_of(warm), cached_of(warm)) == (tokens_of(cold), [256])
            answers.append(tokens_of(cold)[0])
        assert answers[0] != answers[1] != answers[2]
        # Under the first one's name and path another one's weights: vLLM may load them any time.
        shutil.copytree(two[2], one[2], dirs_exist_ok=True)
        assert cached_of(engine.generate(prompt, lora=one)) == [0]
    with Engine(server.target, extra=ALWAYS, **settings) as fresh:
        changed = fresh.generate(prompt, lora=one)
        assert (cached_of(changed), tokens_of(changed)) == ([0], [answers[2]])
        assert cached_of(fresh.generate(prompt, lora=two)) == [256]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load_format": "dummy"}, "not known to be those of the files"),
        ({"role": "kv_producer"}, "kv_both"),
    ],
)
def test_what_would_make_the_identity_false_is_refused(
    server: ServerProcess, tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    from . import tiny

    settings = {
        "model": str(tiny.llama(tmp_path / "llama")),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        **changed,
    }
    with pytest.raises(EngineFailed, match=message), Engine(server.target, **settings):
        pass
