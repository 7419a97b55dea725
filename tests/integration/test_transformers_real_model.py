"""A real small model, since a random one has no near-ties, no long words and no BOS token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvstore
from kvstore.testing import ServerProcess
from kvstore.types import TierName
from tests.integration.tiny_models import BLOCK, Watched

TEXT = """The keys and values of a prompt's tokens depend on the tokens before them, and on nothing
that comes after. So a prefix that was computed once need not be computed again, wherever it
occurs: a system prompt, a document that many questions are asked about, the turns of a
conversation. """


@pytest.mark.timeout(300)
def test_a_real_model_answers_the_same_from_shared_memory_and_from_redis(
    model_dir: Path, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = tokenizer(TEXT * 8, return_tensors="pt").input_ids[:, :300]
    assert ids.shape == (1, 300)
    options = {"max_new_tokens": 8, "do_sample": False}
    with (
        ServerProcess(folder, cpu_bytes="64MiB") as server,
        kvstore.connect(server.target) as store,
        Watched(model, store) as watched,
    ):
        plain = watched.plain(ids, **options).tolist()
        assert watched.generate(ids, **options).tolist() == plain
        for tier in (TierName.CPU, TierName.REDIS):
            with watched.counting() as counted:
                assert watched.generate(ids, **options).tolist() == plain
            assert counted.hits(tier) == 4 * BLOCK
            assert counted.prefilled == 300 - 4 * BLOCK
            store.clear(arena_only=True)
