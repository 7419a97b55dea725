"""Small models with random weights, for what the real one has not: more ranks, other caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # else all answers are the same token
}


def llama(folder: Path) -> Path:
    return _saved(LlamaForCausalLM(_seeded(LlamaConfig(**SIZES, head_dim=32))), folder)


def mistral_with_windows(folder: Path) -> Path:
    config = MistralConfig(**SIZES, head_dim=32, sliding_window=64)
    return _saved(MistralForCausalLM(_seeded(config)), folder)


def deepseek_with_latents(folder: Path) -> Path:
    config = DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4},
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return _saved(DeepseekV2ForCausalLM(_seeded(config)), folder)


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the real small model, with random weights."""
    torch.manual_seed(seed)
    rank, hidden, kv = 8, 576, 192
    tensors = {}
    for layer in range(30):
        for name, out in (("q_proj", hidden), ("v_proj", kv)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, rank) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _seeded(config: Any) -> Any:
    torch.manual_seed(7)
    return config


def _saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
