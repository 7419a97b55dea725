"""What the demo asks the model: three workloads, from all prefix reuse to none.

Plain data and one helper that turns it into token ids. Lengths are chosen so that four passes over
everything take about four minutes on two slow cores (270 tokens a second of prefill, 120 ms a
generated token). Knows nothing of kvstore or of how the model is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANDBOOK = Path(__file__).resolve().parent / "data" / "handbook.md"


@dataclass(frozen=True)
class Turn:
    """One request: what the user says, under which system prompt."""

    system: str
    user: str


@dataclass(frozen=True)
class Scenario:
    """Requests to send one after the other.

    With `keeps_history`, a request's prompt also holds all turns before it and the model's answers
    to them; otherwise the requests are independent.
    """

    name: str
    description: str
    turns: tuple[Turn, ...]
    max_new_tokens: int
    keeps_history: bool = False

    def next_prompt(self, tokenizer: Any, answers: Sequence[str]) -> list[int] | None:
        """Return the token ids of the request that follows `answers`, or None after the last one.

        `answers` are the model's texts so far, one a request, without special tokens. `tokenizer`
        is a Hugging Face one; without a chat template, turns are joined as plain text.
        """
        index = len(answers)
        if index >= len(self.turns):
            return None
        messages = [{"role": "system", "content": self.turns[index].system}]
        if self.keeps_history:
            for turn, answer in zip(self.turns, answers, strict=False):
                messages.append({"role": "user", "content": turn.user})
                messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.turns[index].user})
        return _token_ids(tokenizer, messages)


def _token_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        text = "".join(f"{message['role']}: {message['content']}\n\n" for message in messages)
        return list(tokenizer(text + "assistant:")["input_ids"])
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


def long_document() -> Scenario:
    """Six short questions about one document of 1,900 tokens, which each prompt begins with."""
    document = HANDBOOK.read_text(encoding="utf-8").strip()
    system = "Answer the question about the handbook with a few words from it."
    questions = (
        "What is the main telescope called?",
        "What is the altitude of the observatory?",
        "What is the radio antenna called?",
        "Who founded the Varnholt Observatory in 1974?",
        "What is the name of the station doctor?",
        "Who found a comet in 1991?",
    )
    return Scenario(
        name="long_document",
        description="six questions about one long document",
        turns=tuple(Turn(system, f"{document}\n\n---\n\n{question}") for question in questions),
        max_new_tokens=20,
    )


def chat() -> Scenario:
    """Five turns of one conversation; each prompt begins with the whole one before it."""
    system = (
        "You are Juniper, the assistant of a small travel agency by the sea. You help its"
        " customers to plan walks, train journeys and meals along the coast. Follow these rules."
        " Answer in one short sentence, in plain words, and never with a list. Be friendly, but"
        " don't repeat what the customer said. Speak of places and not of prices: prices change"
        " every week and the office tells them by telephone. When a customer asks about the"
        " weather, advise warm clothes, a raincoat and good shoes, because the wind at the coast"
        " turns quickly. When a customer asks for a doctor or the police, give the number of the"
        " emergency services first. Never promise a seat or a room; say that the office will"
        " confirm it. The office is open from nine to five, is closed on Sundays, and is found"
        " next to the old lighthouse, two minutes on foot from the station. If you don't know"
        " something, say so and name the office."
    )
    says = (
        "Hello! We are two friends and we want to walk along the coast for a day.",
        "What should we take with us for the walk?",
        "Where can we eat fish in the evening?",
        "Is it better to travel home by train or by bus?",
        "When is your office open?",
    )
    return Scenario(
        name="chat",
        description="five turns of one conversation",
        turns=tuple(Turn(system, text) for text in says),
        max_new_tokens=24,
        keeps_history=True,
    )


def short_prompts() -> Scenario:
    """Six short prompts that share nothing, with answers much longer to make than to prepare."""
    return Scenario(
        name="short_prompts",
        description="six short prompts with nothing in common",
        turns=(
            Turn("Gardener.", "Tell me how tomatoes are grown from seed."),
            Turn("You are a historian.", "What was a lighthouse keeper's day like?"),
            Turn("Write for children.", "Begin a story about a fox and a paper boat."),
            Turn("Baker's advice only.", "How does bread dough rise, and why does it need rest?"),
            Turn("Explain simply.", "Why is the sky blue at noon and red in the evening?"),
            Turn("Poet.", "Describe a harbour early in the morning, in calm words."),
        ),
        max_new_tokens=24,
    )


def scenarios() -> tuple[Scenario, ...]:
    """Return all of the demo's scenarios, in the order in which it runs them."""
    return (long_document(), chat(), short_prompts())
