"""What the documents say in numbers is computed, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.layout import KVLayout

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_bytes_a_token_are_those_of_the_layout() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d.]+) GiB \|$",
        (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 7
    for model, layers, heads, size, bytes_a_token, gib in rows:
        layout = KVLayout(
            model=model,
            revision="any",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            layers=int(layers),
            kv_heads=int(heads),
            head_size=int(size),
            value_head_size=0 if "latent" in model else int(size),
            rope="any",
            arrangement="any",
            block_tokens=64,
        )
        assert f"{layout.bytes_per_token:,}" == bytes_a_token
        assert f"{layout.bytes_per_token * 100_000 / 2**30:.1f}" == gib


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]*)[^)]*\)", document.read_text(encoding="utf-8")):
        if target and "://" not in target:
            assert (document.parent / target).exists(), target
