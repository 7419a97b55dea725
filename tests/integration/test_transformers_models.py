"""Which architectures are served, equal to plain generation, and which are refused, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import kvstore
from engine.plugins.transformers import CachedModel
from kvstore.errors import UnsupportedModel
from kvstore.testing import ServerProcess
from tests.integration.tiny_models import SIZES, Watched, padded, prompt, seeded, tiny_llama

ROPE = {"rope_theta": 10000.0}


@pytest.fixture
def store(server: ServerProcess) -> Iterator[kvstore.Store]:
    with kvstore.connect(server.target) as store:
        yield store


def made(name: str, **changes: Any) -> Any:
    """A tiny model of this architecture, without its empty settings."""
    config = getattr(transformers, f"{name}Config")
    model = getattr(
        transformers,
        "GPT2LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM",
    )
    settings = {key: value for key, value in {**SIZES, **changes}.items() if value != "-"}
    return seeded(lambda: model(config(**settings)))


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
SERVED: dict[str, Any] = {
    "Llama": lambda: made("Llama"),
    "Llama, llama3 rope": lambda: made(
        "Llama",
        rope_parameters={
            **ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "Llama, yarn rope": lambda: made(
        "Llama",
        rope_parameters={
            **ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        },
    ),
    "Llama, one head of KV": lambda: made("Llama", num_key_value_heads=1, head_dim=24),
    "Mistral without a window": lambda: made("Mistral", sliding_window=None),
    "Qwen2": lambda: made("Qwen2"),
    "Qwen3": lambda: made("Qwen3", head_dim=16),
    "Qwen3 of experts": lambda: made(
        "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "GPT-2": lambda: made("GPT2", **GPT2),
    "OPT": lambda: made("OPT", ffn_dim=48, word_embed_proj_dim=32, bos_token_id=1),
    "Bloom": lambda: made("Bloom", n_layer=2, n_head=4),
    "Falcon, one head of KV": lambda: made("Falcon", multi_query=True, parallel_attn=True),
    "GPT-NeoX": lambda: made("GPTNeoX"),
    "Phi": lambda: made("Phi"),
    "Phi-3": lambda: made("Phi3", sliding_window=None),
    "Gemma": lambda: made("Gemma", head_dim=16),
    "Granite": lambda: made("Granite", residual_multiplier=0.5),
    "DeepSeek V3": lambda: made(
        "DeepseekV3", n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=16, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_key_value_heads=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_a_served_architecture_answers_as_without_reuse(name: str, store: kvstore.Store) -> None:
    rows = [prompt(150), prompt(200, 1)]
    with Watched(SERVED[name](), store, salt=name) as model:
        if model.model.generation_config.eos_token_id is not None:
            model.model.generation_config.eos_token_id = None
        for row in rows:
            model.check(row)
            with model.counting() as counted:
                model.check(row)
            assert counted.usage.hit().tokens == (row.shape[1] - 1) // 64 * 64
        with model.counting() as counted:
            model.check(padded(rows))
        assert counted.prefilled == 200 - (50 + 128)


def test_the_values_of_a_model_may_have_another_size_than_its_keys(store: kvstore.Store) -> None:
    with CachedModel(SERVED["DeepSeek V3"](), store=store, pool_bytes=0) as cached:
        assert cached.layout.head_size != cached.layout.value_head_size


REFUSED: dict[str, Any] = {
    "sliding window, all layers": (
        lambda: made("Mistral", sliding_window=64), "sliding windows",
    ),
    "sliding window, some layers": (
        lambda: made("Gemma2", head_dim=16, sliding_window=64), "sliding windows",
    ),
    "Gemma 3": (lambda: made("Gemma3Text", head_dim=16, sliding_window=64), "sliding windows"),
    "Qwen2 with a window": (
        lambda: made("Qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1),
        "sliding windows",
    ),
    "Mamba": (lambda: made("Mamba", state_size=4, num_key_value_heads="-"), "recurrent"),
    "Mamba 2": (
        lambda: made("Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=1), "recurrent",
    ),
    "RWKV": (lambda: made("Rwkv", attention_hidden_size=32), "recurrent"),
    "recurrent Gemma": (
        lambda: made("RecurrentGemma", num_hidden_layers=3, attention_window_size=64, lru_width=32),
        "recurrent|sliding",
    ),
    "Falcon H1": (
        lambda: made(
            "FalconH1", head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
            mamba_d_state=8, mamba_n_groups=1,
        ),
        "recurrent|sliding",
    ),
    "dynamic NTK rope": (
        lambda: made(
            "Llama", rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.0}
        ),
        "length",
    ),
    "longrope": (
        lambda: made(
            "Phi3", sliding_window=None, original_max_position_embeddings=128,
            rope_parameters={
                **ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4, "factor": 8.0,
                "original_max_position_embeddings": 128,
            },
        ),
        "length",
    ),
    "an encoder": (
        lambda: seeded(
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=160,
                    decoder_start_token_id=0,
                )
            )
        ),
        "encoder",
    ),
    "no language model": (
        lambda: seeded(
            lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
        ),
        "not a Hugging Face model that generates",
    ),
    "no model": (lambda: torch.nn.Linear(2, 2), "not a Hugging Face model"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_model_whose_kv_is_no_prefix_of_blocks_is_refused_with_the_reason(
    name: str, store: kvstore.Store
) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=reason):
        CachedModel(make(), store=store)


def test_layers_whose_kv_has_different_shapes_are_refused(store: kvstore.Store) -> None:
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(32, 8, bias=False)
    attention.v_proj = torch.nn.Linear(32, 8, bias=False)
    attention.num_key_value_groups = 4
    with pytest.raises(UnsupportedModel, match="layers differ"):
        CachedModel(model, store=store)


def test_a_model_spread_over_devices_is_refused(store: kvstore.Store) -> None:
    model = tiny_llama()
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.1": "cpu"}
    with pytest.raises(UnsupportedModel, match="several devices"):
        CachedModel(model, store=store)
