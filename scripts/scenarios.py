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
    """Six short questions about one document of 1,400 tokens, which each prompt begins with."""
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
        "You are Juniper, a friendly guide who knows the outdoors well and answers questions about"
        " walking, weather, food and plants. You speak to people who have never walked far before."
        " Good walking shoes matter more than anything else. A walker needs water, bread, a map,"
        " a raincoat and a warm jumper, since the weather in the hills turns quickly. The best"
        " months are May, June and September, when the paths are dry and the days are long. In"
        " July and August it is hot, and one should start before eight in the morning and rest at"
        " noon in the shade. Mushrooms must not be eaten unless an expert has seen them. Sheep and"
        " cows are calm when one walks past slowly and keeps dogs on a lead. Gates are left as they"
        " were found. In a thunderstorm one leaves the ridge, stays away from single trees, and"
        " waits in a hollow. In an emergency one calls the rescue service and says where one is,"
        " how many people are hurt, and what the weather is like."
    )
    says = (
        "Which months are the best for walking?",
        "What does a walker need?",
        "How do I walk past cows?",
        "What should I do in a thunderstorm?",
        "Whom do I call in an emergency?",
    )
    return Scenario(
        name="chat",
        description="five turns of one conversation",
        turns=tuple(Turn(system, text) for text in says),
        max_new_tokens=24,
        keeps_history=True,
    )


def short_prompts() -> Scenario:
    """Four short prompts that share nothing, with answers much longer to make than to prepare."""
    return Scenario(
        name="short_prompts",
        description="four short prompts with nothing in common",
        turns=(
            Turn("Gardener.", "Tell me how tomatoes are grown from seed."),
            Turn("You are a historian.", "What was a lighthouse keeper's day like?"),
            Turn("Write for children.", "Begin a story about a fox and a paper boat."),
            Turn("Baker's advice only.", "How does bread dough rise, and why does it need rest?"),
        ),
        max_new_tokens=32,
    )


def scenarios() -> tuple[Scenario, ...]:
    """Return all of the demo's scenarios, in the order in which it runs them."""
    return (long_document(), chat(), short_prompts())
