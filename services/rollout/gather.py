"""Several coroutines as one: all of their results, or the first error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Their results, in order. The first that fails cancels the others, and when they have ended its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
