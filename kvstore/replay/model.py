"""A model's shape, as far as replay needs it: bytes of KV a token, and seconds of prefill.

The cost model is stated wherever its seconds are shown. A prefill of n tokens takes

    (2 · parameters · n  +  2 · layers · heads · head size · n²) / 400 TFLOP/s

the matrix products and causal attention, at what a current accelerator reaches for one request.
Loading is not deducted. Knows nothing of traces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError

FLOPS = 400e12
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size and the cost of KV."""

    name: str
    layers: int
    heads: int
    head_size: int
    parameters: float
    """Those that take part in computing one token."""
    kv_bytes_per_token: int

    def prefill_s(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds to prefill so many tokens from the start of a prompt."""
        n = tokens.astype(np.float64)
        attention = 2.0 * self.layers * self.heads * self.head_size
        return (2.0 * self.parameters * n + attention * n * n) / FLOPS

    @property
    def cost_model(self) -> str:
        """The cost model in a sentence."""
        return (
            f"Prefill seconds are those of {self.name} at {FLOPS / 1e12:.0f} TFLOP/s, "
            "loading not deducted."
        )


MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3.1-8b": ModelShape("llama-3.1-8b", 32, 32, 128, 7.5e9, 131_072),
        "llama-3.1-70b": ModelShape("llama-3.1-70b", 80, 64, 128, 69.5e9, 327_680),
    }
)
DEFAULT_MODEL = "llama-3.1-8b"


def model_shape(name: str) -> ModelShape:
    """The model of this name, or of this config.json, or of a folder with one.

    Raises:
        ConfigError: it is neither, or the file lacks what is needed.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return _from_config(path.resolve().name if path.is_dir() else file.parent.name, config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--model {name}: not one of {', '.join(MODELS)}, and no config.json of a model "
            f"could be read there ({type(error).__name__}: {error})"
        ) from error


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    config = config.get("text_config", config)
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    experts = int(config.get("num_experts_per_tok") or 0)
    width = int(config["intermediate_size"])
    if experts:
        width = int(config.get("moe_intermediate_size") or width) * experts
    if config.get("kv_lora_rank"):
        elements = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    else:
        elements = 2 * kv_heads * head_size
    dtype_bytes = _DTYPE_BYTES.get(config.get("dtype") or config.get("torch_dtype") or "", 2)
    attention = 2 * hidden * (heads + kv_heads) * head_size
    parameters = layers * (attention + 3 * hidden * width)
    return ModelShape(
        name, layers, heads, head_size, float(parameters), layers * elements * dtype_bytes
    )
