"""Generating with the store: what `CachedModel.generate` does around the model's own.

A block's bytes are the keys of all layers, then the values: kv, layer, head, token, dim.
"""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import kvstore
from engine.admission import Override
from engine.plugins.copying import copy_beside
from engine.plugins.room import Room
from engine.plugins.transformers import support
from engine.plugins.transformers.support import CACHE_ARGUMENT, CACHE_ARGUMENTS, Model, layers_of
from engine.request import Request, Timing
from engine.session import EngineSession
from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.tiers.gpu import GpuTier

log = logging.getLogger("kvstore.engine")

POOL_BYTES = 1 << 30
"""Device memory that the engine's own pool of blocks takes at most, by default."""


class CachedModel:
    """A causal model that reuses KV through kvstore. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: Model,
        target: str | None = None,
        *,
        name: str | None = None,
        tenant: str = "default",
        salt: str = "",
        pool_bytes: int = POOL_BYTES,
        store: kvstore.Store | None = None,
    ):
        """Measures the model's cache with one token, and opens its namespace.

        `target` is the server: "host:port" or "unix:/path", by default the one on this host; or
        pass a `store`, which stays yours to close. `name` is what reports call the model.
        `pool_bytes` bounds the engine's own pool of blocks on the model's device; 0 goes without.

        Raises:
            UnsupportedModel: KV of this model can't be stored; the message says why.
        """
        support.check_supported(model)
        self.model = model
        self._adapter = support.adapter_of(model)
        self._weights = tuple(model.parameters())
        self._weights_state = support.weights_state(self._weights)
        self._geometry = support.measure(model)
        self._room = Room()
        self.layout = support.layout_of(model, self._geometry, name, tenant, salt)
        self._own_store = store is None
        self._store = store if store is not None else kvstore.connect(target)
        pool = GpuTier(model.device, pool_bytes) if pool_bytes else None
        self.session: EngineSession[torch.Tensor] = EngineSession(self._store, self.layout, pool)

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stores what is queued, sends what is to be reported, and disconnects."""
        self.session.close()
        if self._own_store:
            self._store.close()

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        load: Override = Override.DEFAULT,
        keep: Override = Override.DEFAULT,
        **options: Any,
    ) -> Any:
        """Generates like `model.generate`, with the stored prefix loaded and new blocks stored.

        Shapes: `input_ids` and `attention_mask` are [batch, tokens], rows padded on the left.
        `load` and `keep` override the decisions to load and to store for this call.

        Raises:
            UnsupportedModel: another adapter is active than when this object was made, or the
                weights have changed since.
        """
        started_s = time.perf_counter()
        adapter = support.adapter_of(self.model)
        if adapter != self._adapter:
            raise UnsupportedModel(
                f"the model's active adapter is {adapter!r}, but was "
                f"{self._adapter!r} when CachedModel was made: make one for each adapter"
            )
        if support.weights_state(self._weights) != self._weights_state:
            raise UnsupportedModel(
                "the model's weights changed since CachedModel was made, and what is stored is of "
                "the old ones: make another"
            )
        if input_ids is None:
            input_ids = options.pop("inputs", None)  # as the model's own calls it
        pads = self._pads(input_ids, attention_mask, options) if self._serves(options) else None
        if input_ids is None or pads is None:
            return self.model.generate(input_ids, attention_mask=attention_mask, **options)
        rows = [ids[pad:].cpu().numpy() for ids, pad in zip(input_ids, pads, strict=True)]
        requests: list[Request[torch.Tensor]] = []
        try:
            # Extended one by one, so that those begun are cancelled when one fails.
            requests.extend(self.session.begin(row, load=load) for row in rows)
            cache = self._load(requests, pads)
            clock = _FirstToken()
            stopping = StoppingCriteriaList(
                [*(options.pop("stopping_criteria", None) or ()), clock]
            )
            if attention_mask is None:
                attention_mask = torch.ones_like(input_ids)
            begun_s = time.perf_counter()
            output = self.model.generate(
                input_ids,
                attention_mask=attention_mask,
                stopping_criteria=stopping,
                **{CACHE_ARGUMENT: cache},
                **options,
            )
            ended_s = time.perf_counter()
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        first_s = clock.first_s or ended_s
        timing = Timing(
            first_s - begun_s, ended_s - first_s, ended_s - started_s, alone=len(rows) == 1
        )
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self._finish(requests, pads, sequences, cache, timing, keep, options)
        return output

    # -- loading

    def _load(self, requests: list[Request[torch.Tensor]], pads: list[int]) -> DynamicCache:
        """A cache that holds, for every row, as many columns as all rows have loaded.

        A model's cache has one length for the whole batch, so what counts is the column, padding
        included, up to which every row is there. Padding's keys and values are masked: zeros.
        """
        cache = DynamicCache(config=self.model.config)
        block_tokens = self.layout.block_tokens
        columns = min(
            pad + request.plan.blocks * block_tokens
            for pad, request in zip(pads, requests, strict=True)
        )
        if not columns or not any(request.plan.blocks for request in requests):
            for request in requests:
                request.release()
            return cache
        keys, values = self._columns(len(requests), columns, any(pads))
        for row, (request, pad) in enumerate(zip(requests, pads, strict=True)):

            def place(position: int, block: torch.Tensor, row: int = row, pad: int = pad) -> None:
                start = pad + position * block_tokens
                tokens = min(block_tokens, columns - start)
                if tokens > 0:
                    block_keys, block_values = self._split(block)
                    keys[:, row, :, start : start + tokens] = block_keys[:, :, :tokens]
                    values[:, row, :, start : start + tokens] = block_values[:, :, :tokens]

            request.load(place, lambda position, view: place(position, _tensor(view)))
        columns = min(
            pad + request.loaded_blocks * block_tokens
            for pad, request in zip(pads, requests, strict=True)
        )
        for request, pad in zip(requests, pads, strict=True):
            request.truncate(max(columns - pad, 0) // block_tokens)
        if columns and any(request.loaded_blocks for request in requests):
            for layer, layer_keys, layer_values in zip(layers_of(cache), keys, values, strict=True):
                layer.lazy_initialization(layer_keys, layer_values)
                layer.keys = layer_keys[:, :, :columns]
                layer.values = layer_values[:, :, :columns]
        return cache

    def _columns(self, rows: int, columns: int, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for keys and values of all layers: [layers, rows, heads, columns, head size]."""
        shape = self._geometry
        lead = (shape.layers, rows, shape.kv_heads, columns)
        boundary = math.prod(lead) * shape.head_size
        elements = boundary + math.prod(lead) * shape.value_head_size
        if self.model.device.type == "cpu":
            room = self._room.take(elements * shape.dtype.itemsize).view(shape.dtype)
        else:
            room = torch.empty(elements, dtype=shape.dtype, device=self.model.device)
        if padded:
            room.zero_()  # nobody writes padding's columns, and what is masked must not be NaN
        return (
            room[:boundary].view(*lead, shape.head_size),
            room[boundary:].view(*lead, shape.value_head_size),
        )

    def _split(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A block's bytes as its keys and values, each [layers, heads, tokens, head size]."""
        shape, tokens = self._geometry, self.layout.block_tokens
        elements = block.view(shape.dtype)
        boundary = shape.layers * shape.kv_heads * tokens * shape.head_size
        lead = (shape.layers, shape.kv_heads, tokens)
        return (
            elements[:boundary].view(*lead, shape.head_size),
            elements[boundary:].view(*lead, shape.value_head_size),
        )

    # -- storing

    def _finish(
        self,
        requests: list[Request[torch.Tensor]],
        pads: list[int],
        sequences: torch.Tensor,
        cache: DynamicCache,
        timing: Timing,
        keep: Override,
        options: dict[str, Any],
    ) -> None:
        """Ends each row's request with the tokens whose KV is in the cache."""
        cached = cache.get_seq_length()
        prompt_columns = requests[0].plan.shape.prompt_tokens + pads[0]
        stops = self._stop_tokens(options)
        # The caller may go on with this cache, which then grows: keep the tensors as they are.
        layers = [layer for layer in layers_of(cache) if layer.keys is not None]
        sides = [*(layer.keys for layer in layers), *(layer.values for layer in layers)]
        for row, (request, pad) in enumerate(zip(requests, pads, strict=True)):
            ids = sequences[row].cpu()
            answer = ids[prompt_columns:]
            ends = torch.isin(answer, stops).nonzero()
            output_tokens = int(ends[0]) + 1 if len(ends) else len(answer)
            end = min(prompt_columns + output_tokens, cached)

            def pairs(
                position: int, block: torch.Tensor, row: int = row, pad: int = pad
            ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
                start = pad + position * self.layout.block_tokens
                span = slice(start, start + self.layout.block_tokens)
                into = [part for side in self._split(block) for part in side.unbind(0)]
                return into, [side[row, :, span] for side in sides if side is not None]

            def to_pool(position: int, block: torch.Tensor, pairs: Any = pairs) -> None:
                torch._foreach_copy_(*pairs(position, block))

            def to_host(position: int, view: memoryview, pairs: Any = pairs) -> None:
                target = _tensor(view)
                if self.model.device.type == "cpu":
                    copy_beside(*pairs(position, target))
                else:
                    staged = torch.empty_like(target, device=self.model.device)
                    torch._foreach_copy_(*pairs(position, staged))
                    target.copy_(staged)

            tokens = ids[pad:end].numpy()
            request.finish(tokens, to_host, timing, to_pool, keep, output_tokens)

    # -- what is served

    def _chosen(self, options: dict[str, Any], name: str) -> Any:
        """A setting as the model will see it: the call's, its configuration's, or the model's."""
        if name in options:
            return options[name]
        given = getattr(options.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if given is None else given

    def _stop_tokens(self, options: dict[str, Any]) -> torch.Tensor:
        stops = self._chosen(options, "eos_token_id")
        return torch.as_tensor([] if stops is None else stops).reshape(-1).cpu()

    def _serves(self, options: dict[str, Any]) -> bool:
        """Whether this call works on one cache that only grows, made of tokens alone."""
        return (
            not self.model.training  # dropout would be stored
            and not any(options.get(name) is not None for name in _UNSERVED)
            and all(self._chosen(options, name) in (None, plain) for name, plain in _PLAIN.items())
        )

    def _pads(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> list[int] | None:
        """As `_left_pads`; None also where the model would find padding by itself.

        Without a mask, it takes its padding token for padding, unless that ends answers too.
        """
        pad_token = self._chosen(options, "pad_token_id")
        if attention_mask is None and input_ids is not None and pad_token is not None:
            stops = self._stop_tokens(options)
            if (input_ids == pad_token).any() and not (stops == pad_token).any():
                return None
        return _left_pads(input_ids, attention_mask)


_PLAIN = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "token_healing": False,
    "use_mtp": False,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    # What was loaded has none.
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Settings that keep a call to one growing cache, and a result that does not show it."""

_UNSERVED = (
    *CACHE_ARGUMENTS,
    "inputs_embeds",
    "pixel_values",
    "input_features",
    "position_ids",
    "token_type_ids",
    "assistant_model",
    "custom_generate",
)


class _FirstToken(StoppingCriteria):
    """Notes when the first token was there. Stops nothing."""

    def __init__(self) -> None:
        self.first_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_s is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self.first_s = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _left_pads(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> list[int] | None:
    """Padding before each row's tokens; None when a row is padded elsewhere, or has no token."""
    if input_ids is None or input_ids.dim() != 2:
        return None
    if attention_mask is None:
        return [0] * input_ids.shape[0]
    if attention_mask.shape != input_ids.shape:
        raise InvalidRequest(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(input_ids.shape)} differ in shape"
        )
    mask = attention_mask.bool()
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        return None
    pads: list[int] = (~mask).sum(dim=1).tolist()
    return pads


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
