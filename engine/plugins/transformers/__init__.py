"""KV reuse for Hugging Face causal models, across calls, processes and hosts.

    from engine.plugins.transformers import CachedModel

    cached = CachedModel(model)                     # the kvstore server on this host
    output = cached.generate(**inputs, max_new_tokens=64)

`generate` takes and returns what the model's own does. It loads the prompt's longest stored
prefix into the model's cache object, lets the model prefill the rest, and stores the blocks of
the prompt and of the answer in the background. What it can't serve (beam search, a cache of the
caller's, embeddings instead of tokens, a model in training mode) goes straight to the model.
"""

from engine.admission import Override
from engine.plugins.transformers.cached_model import CachedModel

__all__ = ["CachedModel", "Override"]
