"""The scripts: generated code is current, and the demo's prompts share what they should."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import scenarios

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 16  # the smallest block in use: nothing shorter than this is ever shared


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def prompts_of(scenario: scenarios.Scenario, tokenizer: Any, answer: str) -> list[list[int]]:
    prompts: list[list[int]] = []
    while (ids := scenario.next_prompt(tokenizer, [answer] * len(prompts))) is not None:
        prompts.append(ids)
    return prompts


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    differences = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differences, min(len(one), len(other)))


def test_generated_protocol_code_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_protos", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)  # the first use of the model fixture downloads and converts it
def test_questions_about_the_document_share_all_but_their_last_tokens(tokenizer: Any) -> None:
    prompts = prompts_of(scenarios.long_document(), tokenizer, "An answer.")
    assert len(prompts) == 6
    assert 1_300 <= min(map(len, prompts)) <= max(map(len, prompts)) <= 1_600
    for prompt in prompts[1:]:
        assert shared_length(prompts[0], prompt) > len(prompt) - 40


@pytest.mark.timeout(600)
def test_a_chat_prompt_begins_with_the_one_before_it_and_its_answer(tokenizer: Any) -> None:
    answer = " It depends on the wind,  said the keeper"
    prompts = prompts_of(scenarios.chat(), tokenizer, answer)
    assert len(prompts) == 5
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    for before, prompt in itertools.pairwise(prompts):
        assert prompt[: len(before) + len(answer_ids)] == before + answer_ids


@pytest.mark.timeout(600)
def test_short_prompts_share_less_than_a_block(tokenizer: Any) -> None:
    prompts = prompts_of(scenarios.short_prompts(), tokenizer, "An answer.")
    assert len(prompts) == 4
    assert all(20 <= len(prompt) <= 40 for prompt in prompts)
    for number, prompt in enumerate(prompts):
        for other in prompts[:number]:
            assert shared_length(prompt, other) < BLOCK_TOKENS


def test_a_tokenizer_without_a_chat_template_gets_plain_text() -> None:
    class Letters:
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    ids = scenarios.chat().next_prompt(Letters(), [])
    assert ids is not None
    assert "".join(map(chr, ids)).startswith("system: You are Juniper")
