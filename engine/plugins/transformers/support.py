"""Which Hugging Face models can be served, and the identity of their KV bytes (D4).

Geometry is measured, by a forward pass of one token, because configurations name it in too many
ways. Everything that decides what a block's bytes mean goes into `layout_of`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from engine.layout import KVLayout, choose_block_tokens
from kvstore.errors import UnsupportedModel

ARRANGEMENT = "transformers/1: kv,layer,head,token,dim"

WEIGHT_SAMPLES = 1024
"""Elements of each weight that its identity is made of: training moves nearly all of them."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

# Transformers renamed the argument that takes the cache object.
CACHE_ARGUMENTS = ("cache", "past_key_values")
CACHE_ARGUMENT = next(
    name
    for name in CACHE_ARGUMENTS
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# Of a configuration, what says where it came from. The dtype is measured.
_BESIDE_THE_POINT = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)

Model = Any
"""A `PreTrainedModel` that can generate; its methods are typed too loosely to be of use."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a model's cache, as one forward pass of one token left it."""

    layers: int
    kv_heads: int
    head_size: int
    value_head_size: int
    dtype: torch.dtype


def check_supported(model: Model) -> None:
    """Raises UnsupportedModel when KV of this model can't be reused by prefix, naming why."""
    name = type(model).__name__
    if not (isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)):
        raise UnsupportedModel(f"{name} is not a Hugging Face model that generates")
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} has an encoder: its decoder's KV depends on the encoder's input, which "
            "block keys don't cover"
        )
    layers: list[Any] = list(DynamicCache(config=model.config).layers)
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if kinds:
        raise UnsupportedModel(
            f"{name} caches some layers as {', '.join(kinds)}: sliding windows and recurrent "
            "states forget the beginning of a prompt, so its blocks can't be cut from them"
        )
    rope = json.loads(rope_of(model))
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"{name} scales its rotary embedding by the prompt's length (rope type {kind}): the "
            "same prefix has other keys in a longer prompt"
        )
    placement: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if len(set(placement.values())) > 1:
        raise UnsupportedModel(f"{name} is spread over several devices; place it on one")


@torch.no_grad()
def measure(model: Model) -> Geometry:
    """The cache's geometry, by a forward pass of one token: configurations name it too variously.

    Raises:
        UnsupportedModel: the model fills no such cache, or its layers differ.
    """
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})
    name = type(model).__name__
    shapes = {
        (tuple(layer.keys.shape), tuple(layer.values.shape), layer.keys.dtype, layer.values.dtype)
        for layer in layers_of(cache)
        if layer.keys is not None and layer.values is not None
    }
    if not shapes:
        raise UnsupportedModel(
            f"{name} left the cache empty: what it remembers is of another kind, such as a "
            "recurrent state"
        )
    if len(shapes) != 1 or not all(layer.is_initialized for layer in layers_of(cache)):
        raise UnsupportedModel(
            f"{name}'s layers differ in the shape of their KV, or share it: "
            f"{sorted(map(str, shapes))}"
        )
    keys, values, dtype, value_dtype = shapes.pop()
    if dtype not in _DTYPES or dtype != value_dtype or len(keys) != 4 or len(values) != 4:
        raise UnsupportedModel(
            f"{name} caches {dtype} keys of shape {keys}; known are 4 dimensions of "
            f"{', '.join(_DTYPES.values())}"
        )
    return Geometry(len(layers_of(cache)), keys[1], keys[3], values[3], dtype)


@torch.no_grad()
def weights_digest(model: Model) -> str:
    """SHA-256 over the commit, what computes with the weights, and over each weight's name,
    shape, dtype and a sample of it.
    """
    commit = getattr(model.config, "_commit_hash", None)
    digest = hashlib.sha256(f"{commit} {architecture_of(model)}".encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // WEIGHT_SAMPLES)].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_state(weights: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    """What changes when training, loading or casting changes these weights in place.

    Cheap enough to ask before each request; one that sets a weight's `data` goes unseen.
    """
    return [(0 if one.is_inference() else one._version, one.dtype) for one in weights]


def architecture_of(model: Model) -> str:
    """The model's class and settings as canonical JSON: norms, activations, experts, scales."""

    def settings(config: dict[str, Any]) -> dict[str, Any]:
        return {
            name: settings(value) if isinstance(value, dict) else value
            for name, value in config.items()
            if name not in _BESIDE_THE_POINT
        }

    described = [type(model).__name__, settings(model.config.to_dict())]
    return json.dumps(described, sort_keys=True, default=str)


def rope_of(model: Model) -> str:
    """All RoPE parameters of the configuration as canonical JSON."""
    config = model.config.get_text_config(decoder=True)
    found: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"):
        if getattr(config, name, None) is not None:
            found[name] = getattr(config, name)
    for name in ("rope_scaling", "rope_parameters"):
        found.update(getattr(config, name, None) or {})
    return json.dumps(found, sort_keys=True, default=str)


def adapter_of(model: Model) -> str:
    """Names of the active adapters, joined; empty when there are none."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return ""
    return ",".join(model.active_adapters())


def layout_of(
    model: Model, geometry: Geometry, name: str | None, tenant: str, salt: str
) -> KVLayout:
    """The complete identity of this model's KV bytes. `name` is what reports call the model."""
    dtype = _DTYPES[geometry.dtype]
    return KVLayout(
        model=name or model.config.name_or_path or type(model).__name__,
        revision=weights_digest(model),
        adapter=adapter_of(model),
        dtype=dtype,
        kv_dtype=dtype,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_size=geometry.head_size,
        value_head_size=geometry.value_head_size,
        rope=rope_of(model),
        arrangement=ARRANGEMENT,
        block_tokens=choose_block_tokens(None),
        tenant=tenant,
        salt=salt,
    )


def layers_of(cache: DynamicCache) -> list[DynamicLayer]:
    """The cache's layers; of a supported model, each is a growing one."""
    return cast(list[DynamicLayer], cache.layers)
