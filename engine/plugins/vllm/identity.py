"""Which vLLM engines can be served, and the identity of their KV bytes.

The identity is made where the KV is: in the worker, from the tensors, the attention backend and
the weights' files. The scheduler is told it, so the two can't differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import vllm
import xxhash
from huggingface_hub import try_to_load_from_cache
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from engine.layout import KVLayout
from engine.plugins.vllm.options import Options
from kvstore.errors import UnsupportedModel

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
READ_BYTES = 16 << 20
READERS = 8

FILE_FORMATS = ("auto", "safetensors", "pt", "npcache", "gguf", "mistral", "bitsandbytes")
"""Ways to load weights that take them from the files, and all of them."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

# Of a model's configuration, what says where it came from, or is named elsewhere.
_BESIDE_THE_POINT = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version"})


def check_supported(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Raises UnsupportedModel when this engine's KV can't be reused by prefix, naming why."""
    model = config.model_config.model
    parallel = config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedModel(f"kvstore does not serve {name} {size} yet; use 1")
    if (load_format := config.load_config.load_format) not in FILE_FORMATS:
        raise UnsupportedModel(
            f"with load_format {load_format!r} the weights are not known to be those of the files"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise UnsupportedModel(
            f"kvstore does not serve speculation by {speculative.method}: the draft model has KV "
            "of its own"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedModel(
            "with calculate_kv_scales the scales of quantised KV differ from one start to the "
            "next; use a checkpoint that has them"
        )
    if len(kv_cache.kv_cache_groups) != 1:
        raise UnsupportedModel(
            f"{model} keeps {len(kv_cache.kv_cache_groups)} groups of KV caches (hybrid models: "
            "sliding windows, recurrent states); kvstore serves models with one"
        )
    spec = kv_cache.kv_cache_groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedModel(
            f"{model} caches {type(spec).__name__}: what it keeps of a prompt's beginning can't "
            "be cut into blocks; kvstore serves full attention"
        )
    if spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
        raise UnsupportedModel(
            f"{model} has layers with sliding windows, chunks, or attention to later tokens; "
            "kvstore serves causal full attention"
        )
    if spec.page_size_bytes != spec.unpadded_page_size_bytes or spec.tokens_per_state != 1:
        raise UnsupportedModel(f"{model} has padded or compressed pages of KV: {spec}")


def layout_of(
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    layers: Mapping[str, torch.Tensor],
    options: Options,
) -> KVLayout:
    """The complete identity of this worker's KV bytes."""
    model = config.model_config
    group = kv_cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    dtype = _name_of(model.dtype)
    latent = isinstance(spec, MLAAttentionSpec)
    rope = rope_of(model.hf_text_config)
    layout = KVLayout(
        model=_model_name(model.model),
        revision=f"{weights_digest(config)}/{settings_digest(config)}",
        dtype=dtype,
        kv_dtype=_name_of(spec.dtype),
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        value_head_size=spec.head_size_v,
        rope=rope,
        attention="latent" if latent else "full",
        arrangement=_arrangement(config, kv_cache, layers),
        block_tokens=options.block_tokens_for(spec.block_size),
        tensor_rank=get_tensor_model_parallel_rank(),
        tensor_size=config.parallel_config.tensor_parallel_size,
        tenant=options.tenant,
        salt=options.salt,
    )
    expected = layout.bytes_per_token * spec.block_size
    if expected != spec.page_size_bytes * layout.layers:
        raise UnsupportedModel(
            f"a page of {spec.page_size_bytes} bytes holds more than keys and values, which are "
            f"{expected // layout.layers} bytes"
        )
    return layout


def _arrangement(
    config: VllmConfig, kv_cache: KVCacheConfig, layers: Mapping[str, torch.Tensor]
) -> str:
    """How a page's bytes are ordered: by whom, for which kernels, in which shape."""
    backends = sorted(
        {
            backend.get_name()
            for name in layers
            if (backend := _backend_of(config, name)) is not None
        }
    )
    shapes = sorted({f"{tuple(t.shape[1:])}/{t.stride()[1:]}/{t.dtype}" for t in layers.values()})
    names = hashlib.sha256(" ".join(layers).encode()).hexdigest()[:16]
    device = next(iter(layers.values())).device.type
    # On a CPU the kernels' packing depends on the instruction set.
    kernels = torch.backends.cpu.get_cpu_capability() if device == "cpu" else ""
    parts = {
        "vllm": vllm.__version__,
        "backends": backends,
        "page": shapes,
        "layout": kv_cache.kv_cache_layout,
        "layers": names,
        "device": f"{device} {kernels}".strip(),
        "cache_dtype": config.cache_config.cache_dtype,
    }
    return "vllm/1: layer,page,bytes " + json.dumps(parts, sort_keys=True, default=str)


def _backend_of(config: VllmConfig, name: str) -> Any:
    layer = config.compilation_config.static_forward_context.get(name)
    return getattr(layer, "attn_backend", None)


def settings_digest(config: VllmConfig) -> str:
    """SHA-256 over the settings that decide what the weights compute, beside the weights."""
    model = config.model_config
    settings = {
        "architecture": model.architecture,
        "config": _settings(model.hf_config.to_dict()),
        "quantization": model.quantization,
        "runner": model.runner_type,
        "loader": str(config.load_config.model_loader_extra_config),
        "multimodal": getattr(model.multimodal_config, "mm_processor_kwargs", None),
    }
    kind = json.loads(rope_of(model.hf_text_config)).get("rope_type", "default")
    if kind in LENGTH_DEPENDENT_ROPE:
        settings["max_model_len"] = model.max_model_len
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _BESIDE_THE_POINT
    }


def rope_of(config: Any) -> str:
    """All RoPE parameters of the configuration as canonical JSON."""
    found = {
        name: getattr(config, name)
        for name in ("rope_theta", "partial_rotary_factor")
        if getattr(config, name, None) is not None
    }
    for name in ("rope_scaling", "rope_parameters"):
        found.update(getattr(config, name, None) or {})
    return json.dumps(found, sort_keys=True, default=str)


def weights_digest(config: VllmConfig) -> str:
    """A hash over the whole content of the weights' files, the same for the same files anywhere.

    Samples would not do: a fine-tune may differ from its base in some rows of the embedding.
    vLLM has just read the files, so they come from the page cache.

    Raises:
        UnsupportedModel: there are no files to look at.
    """
    model = config.model_config
    folder = _folder_of(model, config.load_config.download_dir)
    files = sorted(_weight_files(folder)) if folder is not None else []
    if not files:
        raise UnsupportedModel(
            f"the weights' files of {model.model} can't be found, and its name alone does not "
            "say which weights it has; give the path of a folder"
        )
    with ThreadPoolExecutor(READERS) as readers:
        contents = list(readers.map(_content_hash, files))
    named = [(path.name, content) for path, content in zip(files, contents, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _content_hash(path: Path) -> str:
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            content.update(piece)
    return content.hexdigest()


def _folder_of(model: Any, download_dir: str | None) -> Path | None:
    path = Path(model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    config = try_to_load_from_cache(model.model, "config.json", download_dir, model.revision)
    return Path(config).parent if isinstance(config, str) else None


def _weight_files(folder: Path) -> Iterable[Path]:
    for pattern in WEIGHT_FILES:
        yield from folder.glob(pattern)


def _model_name(model: str) -> str:
    return Path(model).name if Path(model).exists() else model


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
