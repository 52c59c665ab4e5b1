"""Callables whose body does not run during their call: calling one only makes a coroutine or a generator."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

__all__ = ["DEFERRED"]


async def _coroutine(*arguments: Any) -> None:
    pass


def _generator(*arguments: Any) -> Iterator[None]:
    yield


async def _asynchronous_generator(*arguments: Any) -> AsyncIterator[None]:
    yield


class _Coroutine:
    async def __call__(self, *arguments: Any) -> None:
        pass

    async def method(self, *arguments: Any) -> None:
        pass


class _Generator:
    def __call__(self, *arguments: Any) -> Iterator[None]:
        yield

    def method(self, *arguments: Any) -> Iterator[None]:
        yield


class _AsynchronousGenerator:
    async def __call__(self, *arguments: Any) -> AsyncIterator[None]:
        yield


class _Partial(functools.partial):  # type: ignore[type-arg]
    """A partial that functools.partial does not flatten, because it has attributes."""


_nested = _Partial(_Generator())
_nested.attribute = 1

_FUNCTIONS: tuple[Any, ...] = (
    _coroutine,
    _generator,
    _asynchronous_generator,
    _Coroutine(),
    _Coroutine().method,
    _Generator(),
    _Generator().method,
    _AsynchronousGenerator(),
)

#: Every such callable, and a partial of it.
DEFERRED = (*_FUNCTIONS, *(functools.partial(function) for function in _FUNCTIONS), functools.partial(_nested))
