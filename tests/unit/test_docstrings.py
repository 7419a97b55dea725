"""Everything public says what it is: its own words, or those of the contract it implements."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import engine
import kvstore


def modules() -> Iterator[str]:
    for package in (kvstore, engine):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if "._pb" not in found.name and not found.name.endswith("__main__"):
                yield found.name


MODULES = sorted(modules())
UNAVAILABLE = ("vllm",)


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in UNAVAILABLE:
            pytest.skip(f"{name} needs {error.name}")
        raise


def public(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if not name.startswith("_"):
            yield name, value


def undocumented(module: ModuleType) -> Iterator[str]:
    if not module.__doc__:
        yield "the module"
    for name, value in public(module):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) and not inspect.getdoc(value):
            yield name
        if inspect.isclass(value):
            # A dataclass or enum makes itself a docstring, so look at what was written.
            if not value.__doc__ or value.__doc__.startswith(f"{name}("):
                yield name
            for member, attribute in public(value):
                plain = getattr(attribute, "fget", None) or getattr(attribute, "__func__", None)
                if inspect.isfunction(plain or attribute) and not any(
                    getattr(vars(base).get(member), "__doc__", None) for base in value.__mro__
                ):
                    yield f"{name}.{member}"


def test_the_walk_finds_the_packages() -> None:
    assert {"kvstore.tiers.redis", "kvstore.client.planes", "engine.hashing"} <= set(MODULES)
    assert len(MODULES) > 40


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name: str) -> None:
    assert list(undocumented(load(name))) == []


class Silent:
    def method(self) -> None: ...

    @property
    def quality(self) -> int:
        return 1


def test_the_check_sees_a_missing_docstring() -> None:
    module = ModuleType("made_up", "Its docstring.")
    Silent.__module__ = "made_up"
    module.Silent = Silent  # type: ignore[attr-defined]
    assert list(undocumented(module)) == ["Silent", "Silent.method", "Silent.quality"]
