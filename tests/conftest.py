"""Fixtures for every folder of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The folder of a real small model in float32; made on first use, which takes a minute."""
    return model.prepare("float32")
