"""Shared parts of the swarm tests: `async def` tests run in uvloop, in bounded time, and leave no process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Iterator

import psutil
import pytest
import uvloop

TEST_TIMEOUT_S = 45.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests; pytest itself can't."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    uvloop.run(_bounded(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def _bounded(body: Awaitable[None]) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await body


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """Whatever a test starts has ended when the test has."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not left
