"""A router that knows only the published format, beside a node at random: what it believes is what
`GET /v1/blocks` lists, and nothing that is known to have left storage."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.api.test_kv_events import Router, publishing
from tests.faulty import FaultyStore
from tests.latch import PATIENCE_S
from tests.sessions import begin_request
from tests.world import GQA, World, world
from tierkv.api.routes_node import Listings
from tierkv.api.types import BlockAnswer
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt
from tierkv.clock import SystemClock
from tierkv.errors import BadRequestError
from tierkv.service import kv_events
from tierkv.storage.maintenance import remove
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

THROUGH = WritePolicy.WRITE_THROUGH
STEPS = 40
FEW_EVENTS = 6  # that wait for the publisher; a reset has more


@dataclass
class Machine:
    here: World
    reader: Router
    rng: random.Random
    prompts: list[Prompt] = field(default_factory=list)
    stores: list[MemoryStore] = field(default_factory=list)

    @property
    def store(self) -> FaultyStore:
        return self.here.the_store

    async def step(self) -> None:
        names = ["run"] * 5 + ["look", "flush", "reset", "delete", "detach", "attach", "tenant"]
        await getattr(self, self.rng.choice(names))()
        await self.here.settle()
        await self.check()

    async def run(self) -> None:
        """A request, at times of a tenant, that shares its beginning with others."""
        family = self.rng.randrange(3) * 100
        tokens = list(range(family, family + self.rng.randrange(4, 25)))
        tokens += [self.rng.randrange(50) for _ in range(self.rng.randrange(6))]
        tenant = self.rng.choice(["", "", "a", "b"])
        space = self.here.service.space_of_tenant(tenant) if tenant else ""
        prompt = Prompt.of(tokens, GQA.block_size, space=space)
        request = await begin_request(
            self.here.service, f"{len(self.prompts)}", prompt, max_new_tokens=0
        )
        await self.here.prefill(request, tokens)
        self.here.service.scheduler.end(request)
        self.prompts.append(prompt)

    async def look(self) -> None:
        """Ask storage for every prompt, as requests would."""
        for prompt in self.prompts:
            if prompt.space in {space.name for space in self.here.service.index.spaces.all()}:
                await self.here.service.lookup(prompt)

    async def flush(self) -> None:
        """Somebody empties the store. Lookups find that out, where the blocks are not here, too."""
        if self.here.service.store is not None:
            await remove(self.here.service.store, "tierkv:")
            await self.here.service.forget()
            await self.look()

    async def reset(self) -> None:
        self.here.service.reset()

    async def delete(self) -> None:
        await self.here.service.free(clears_storage=True)

    async def detach(self) -> None:
        self.here.service.detach_storage()

    async def attach(self) -> None:
        """The store that was there, or another one."""
        self.stores = self.stores or [MemoryStore(MemorySettings(), SystemClock())]
        stores: list[Store] = [self.store, *self.stores]
        await self.here.service.attach_storage(self.rng.choice(stores))

    async def tenant(self) -> None:
        spaces = [space.name for space in self.here.service.index.spaces.all() if space.name]
        if spaces:
            try:
                await self.here.service.retire_fingerprint(self.rng.choice(spaces))
            except BadRequestError as error:
                assert "in use" in str(error)  # noqa: PT017 - both are fine

    def listed(self) -> list[BlockAnswer]:
        service = self.here.service
        page = Listings().page(service.index, service.events, None, limit=100_000)
        return [block for block in page.blocks if not block.is_tail]

    def told(self, medium: str) -> set[str]:
        """The keys of the blocks that the router believes to be there."""
        blocks = self.reader.blocks.get(medium, set())
        return {one.hex() for one in blocks if isinstance(one, bytes)}

    def differences(self) -> list[str]:
        """What the router believes and is not listed, and the reverse."""
        blocks, found = self.listed(), []
        listed = {
            "GPU": {block.digest for block in blocks if block.device == "ready"},
            "CPU": {block.digest for block in blocks if block.host == "ready"},
            "STORAGE": {block.digest for block in blocks if block.is_stored},
        }
        here = {block.digest for block in blocks}
        for medium, expected in listed.items():
            told = self.told(medium)
            if medium == "STORAGE":
                told &= here
            found += [f"{medium}: {one} is told, not listed" for one in told - expected]
            found += [f"{medium}: {one} is listed, not told" for one in expected - told]
        runs = [run for run in self.here.service.events.stored() if not run.is_tail]
        known = {digest.hex() for run in runs for digest in run.digests}
        found += [f"STORAGE: {one} is known, not told" for one in known - self.told("STORAGE")]
        return found

    async def check(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S / 4):
                while self.differences():
                    await self.reader.read()
        except TimeoutError:
            raise AssertionError("\n".join(self.differences())) from None

    async def check_stored(self) -> None:
        """Everything that the router believes to be in storage is there."""
        await self.here.service.forget()
        await self.look()
        await self.run()  # told after everything that was to be told before
        await self.here.settle()
        await self.check()
        store = self.here.service.store
        names = "" if store is None else repr((await store.list("tierkv:", limit=100_000)).values)
        lost = [one for one in self.told("STORAGE") if one not in names]
        assert lost == []


@pytest.mark.promise("A router's view equals `/v1/blocks`.")
@pytest.mark.promise("KV events say which blocks are cached where.")
@pytest.mark.promise("Missed KV events are replayed; after lost ones the full state follows.")
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))]
)
async def test_what_a_router_believes_is_what_the_node_lists(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr(kv_events, "_QUEUED_EVENTS", FEW_EVENTS)
    rng = random.Random(seed)
    async with (
        world(
            with_store=True,
            device_blocks=16,
            host_blocks=24,
            host_write=THROUGH,
            storage_write=[THROUGH, WritePolicy.WRITE_BACK, WritePolicy.SELECTIVE][seed % 3],
        ) as here,
        publishing(tmp_path, here) as (reader, publisher),
    ):
        machine = Machine(here, reader, rng)
        await machine.delete()  # what was told before the router listened
        for _ in range(STEPS):
            await machine.step()
        await machine.check_stored()
        assert bool(publisher.num_lost) == bool(reader.gaps) == bool(seed % 2)
