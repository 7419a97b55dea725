"""kvstore for vLLM: a KV connector that `vllm serve` loads by name.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "engine.plugins.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

vLLM makes one connector for its scheduler and one for each worker. The scheduler's looks up,
plans and decides, with the same session as every plugin (`scheduler.py`); a worker's copies
(`worker.py`) between vLLM's paged blocks (`paged.py`) and the store. What they tell each other
goes with vLLM's own messages (`messages.py`). Only this package imports vLLM.
"""

from __future__ import annotations

from engine.plugins.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
