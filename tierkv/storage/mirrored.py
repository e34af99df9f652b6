"""Several stores with the same values: written to all, read from the first that has them."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableSequence,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar

from tierkv.errors import (
    ConfigError,
    StoreCorruptError,
    StoreRefusedError,
    StoreUnavailableError,
)
from tierkv.storage.base import MAX_TURNS, Noted, forget_damaged, num_leading, present, use_memory
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    Usage,
    check_limit,
    check_names,
    check_prefix,
)
from tierkv.storage.union import list_union, usage_of_union
from tierkv.tasks import task_group

T = TypeVar("T")


class MirroredStore:
    """`Store`. A value is stored if one store has it. The first store is preferred; another
    answers where it fails or has none. A failed store is filled again only by what is put later.
    Of several who put one name at once more than one can be told STORED: each store chooses. Who
    puts with `only_new` asks them one after the other, and one at most is told so as long as one of
    the stores answers them all.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if len(stores) < 2:  # noqa: PLR2004
            raise ConfigError("mirroring needs two stores or more, as mirrored:URL|URL")
        self._stores = tuple(stores)
        self._orders: Noted[Sequence[int]] = Noted()  # of names of which a copy was damaged
        # Which store's copy was read last, and whether others were left to be asked then.
        self._came_from: Noted[tuple[int, bool]] = Noted()

    @property
    def parts(self) -> Sequence[Store]:
        return self._stores

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        for store in self._stores:
            use_memory(store, pools)

    @property
    def url(self) -> str:
        return "mirrored:" + "|".join(store.url for store in self._stores)

    @property
    def capabilities(self) -> Capabilities:
        every = [store.capabilities for store in self._stores]
        return Capabilities(
            is_shared=all(one.is_shared for one in every),
            is_durable=any(one.is_durable for one in every),
            has_ttl=all(one.has_ttl for one in every),
            has_listing=every[0].has_listing,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for store in self._stores:
                await stack.enter_async_context(store.running())
            await self.ping()
            yield

    async def ping(self) -> None:
        """Returns if any store answers: the others' values are there, then, and new ones kept."""
        failures = []
        for store in self._stores:
            try:
                await store.ping()
            except StoreUnavailableError as error:
                failures.append(error)
        if len(failures) == len(self._stores):
            raise failures[0]

    async def exists(self, names: Sequence[str]) -> int:
        """A run may lie partly in one store and partly in another."""
        check_names(names)
        found = 0
        failures: dict[Store, StoreUnavailableError] = {}
        is_longer, num_turns = True, 0
        while is_longer and found < len(names):
            if num_turns == MAX_TURNS:
                return found + num_leading(await self.present(names[found:]))
            is_longer, num_turns = False, num_turns + 1
            for store in self._stores:
                if store in failures or found == len(names):
                    continue
                try:
                    more = await store.exists(names[found:])
                except StoreUnavailableError as error:
                    failures[store] = error
                    continue
                found += more
                is_longer |= more > 0
        if len(failures) == len(self._stores):
            raise next(iter(failures.values()))
        return found

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        found = [False] * len(names)
        failures = []
        for store in self._stores:
            left = [at for at, is_there in enumerate(found) if not is_there]
            if not left:
                break
            try:
                answers = await present(store, [names[at] for at in left])
            except StoreUnavailableError as error:
                failures.append(error)
                continue
            for at, is_there in zip(left, answers, strict=True):
                found[at] = is_there
        if len(failures) == len(self._stores):
            raise failures[0]
        return found

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        outcomes: dict[int, GetOutcome] = {}
        damaged: list[tuple[int, int]] = []  # which store's copy of which item
        for turn in range(len(self._stores)):
            for at, asked in self._left_for_turn(turn, items, outcomes).items():
                answers = await self._stores[at].get_into([items[i] for i in asked])
                for i, answer in zip(asked, answers, strict=True):
                    if i not in outcomes or _get_rank(answer) < _get_rank(outcomes[i]):
                        outcomes[i] = answer
                        self._came_from.note(items[i].name, (at, turn < len(self._stores) - 1))
                    if answer.status is GetStatus.DAMAGED:
                        damaged.append((at, i))
        for at, i in damaged:  # of others whoever reads them is told, and says so
            if outcomes[i].status is GetStatus.HIT:
                with suppress(StoreUnavailableError):
                    await forget_damaged(self._stores[at], [items[i].name])
        return [outcomes[i] for i in range(len(items))]

    def _left_for_turn(
        self, turn: int, items: Sequence[GetItem], outcomes: Mapping[int, GetOutcome]
    ) -> Mapping[int, Sequence[int]]:
        """Which store is asked in its turn for which items that have not come yet."""
        left: dict[int, list[int]] = {}
        for i, item in enumerate(items):
            if i not in outcomes or outcomes[i].status is not GetStatus.HIT:
                left.setdefault(self._order_of(item.name)[turn], []).append(i)
        return left

    def _order_of(self, name: str) -> Sequence[int]:
        return self._orders.get(name) or range(len(self._stores))

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        damage: list[StoreCorruptError] = []

        async def ask(store: Store) -> bytes | None:
            try:
                return await store.get(name, max_bytes=max_bytes)
            except StoreCorruptError as error:
                damage.append(error)
                return None

        content = await self._first(ask, None)
        if content is None and damage:
            raise damage[0]
        return content

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        news = [i for i, item in enumerate(items) if item.only_new]
        if news:
            return await self._put_news(items, news)
        async with task_group() as group:
            puts = [group.create_task(store.put(items)) for store in self._stores]
        best = [_best(outcomes) for outcomes in zip(*(put.result() for put in puts), strict=True)]
        for store, put in zip(self._stores, puts, strict=True):
            old = [
                item.name
                for item, outcome, one in zip(items, best, put.result(), strict=True)
                if not item.leaves_existing and outcome.status is PutStatus.STORED is not one.status
            ]
            if old:  # which would be read instead
                with suppress(StoreUnavailableError):
                    await store.delete(old)
        return best

    async def _put_news(self, items: Sequence[PutItem], news: Sequence[int]) -> list[PutOutcome]:
        """news: which of `items` are to be the first of their names in every store. One that is
        not in the second, where the first has lost its value or was away, is taken back."""
        others = [i for i, item in enumerate(items) if not item.only_new]
        put = await self.put([items[i] for i in others]) if others else []
        results = dict(zip(others, put, strict=True))
        taken_by: dict[int, MutableSequence[Store]] = {i: [] for i in news}
        for store in self._stores:
            left = [i for i in news if i not in results or results[i].status is not _EXISTED]
            if not left:
                break
            for i, outcome in zip(left, await store.put([items[i] for i in left]), strict=True):
                if outcome.status is _EXISTED:
                    for taken in taken_by[i]:
                        with suppress(StoreUnavailableError):
                            await taken.delete([items[i].name])
                if outcome.status is PutStatus.STORED:
                    taken_by[i].append(store)
                results[i] = (
                    outcome
                    if i not in results or outcome.status is _EXISTED
                    else _best((results[i], outcome))
                )
        return [results[i] for i in range(len(items))]

    async def delete(self, names: Sequence[str]) -> int:
        num_there = sum(
            await self.present([*dict.fromkeys(names)])
        )  # one can be in this store, one in that
        counts, failures = await self._all(lambda store: store.delete(names))
        if failures:  # which is no failure of them all: the others are read
            raise StoreRefusedError(str(failures[0])) from failures[0]
        return max(num_there, *counts)

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """Where each was read from; that store is asked for it after the others from now on. It may
        not be able to forget it."""
        check_names(names)
        others: dict[str, bool] = {}
        where: dict[int, list[str]] = {}
        for name in dict.fromkeys(names):
            order = self._order_of(name)
            at, others[name] = self._came_from.get(name, (order[0], True))
            self._orders.note(name, (*(one for one in order if one != at), at))
            where.setdefault(at, []).append(name)
        for at, some in where.items():
            with suppress(StoreUnavailableError):
                more = await forget_damaged(self._stores[at], some)
                others |= {n: others[n] or has_more for n, has_more in zip(some, more, strict=True)}
        return [others[name] for name in names]

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        counts, _ = await self._all(lambda store: store.touch(names, ttl_s=ttl_s))
        if max(counts) == len(names):
            return len(names)
        return max(sum(await self.present(names)), *counts)  # some can be in another store only

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        return await list_union(self._stores, prefix, limit=limit, cursor=cursor)

    async def usage(self, prefix: str) -> Usage:
        check_prefix(prefix)
        return await usage_of_union(self._stores, prefix)

    async def _all(
        self, ask: Callable[[Store], Awaitable[T]]
    ) -> tuple[Sequence[T], Sequence[StoreUnavailableError]]:
        """The answers of the stores that answer, and the others' errors. Raises if all fail."""
        answers, failures = [], []
        for store in self._stores:
            try:
                answers.append(await ask(store))
            except StoreUnavailableError as error:
                failures.append(error)
        if not answers:
            raise failures[0]
        return answers, failures

    async def _first(self, ask: Callable[[Store], Awaitable[T]], nothing: T) -> T:
        """The first answer that is not `nothing`. Raises if all stores fail."""
        failures = []
        for store in self._stores:
            try:
                answer = await ask(store)
            except StoreUnavailableError as error:
                failures.append(error)
                continue
            if answer != nothing:
                return answer
        if len(failures) == len(self._stores):
            raise failures[0]
        return nothing


_EXISTED = PutStatus.EXISTED
_GET_RANK = (GetStatus.HIT, GetStatus.DAMAGED, GetStatus.MISS, GetStatus.FAILED)
_PUT_RANK = (PutStatus.STORED, PutStatus.EXISTED, PutStatus.FULL, PutStatus.FAILED)


def _best(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    """Of stores that are full those first that are so for this value alone."""
    return min(outcomes, key=lambda one: (_PUT_RANK.index(one.status), not one.takes_others))


def _get_rank(outcome: GetOutcome) -> int:
    return _GET_RANK.index(outcome.status)
