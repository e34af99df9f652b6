"""Equal tokens with other media share nothing from there on: on no tier and in no hand-off."""

from __future__ import annotations

import pytest

from tests.latch import finish
from tests.sessions import begin_request, claim_request, publish_request
from tests.world import GQA, World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.errors import HandoffError

SIZE, IDS = GQA.block_size, [7] * 18
CAT, DOG = b"c" * 16, b"d" * 16
Places = tuple[tuple[int, int], ...]  # start and number of tokens
# Where items lie, and how many blocks come before the first of them.
SCENES: dict[str, tuple[Places, int]] = {
    "touches the last edge": (((7, 1),), 1),
    "across an edge": (((3, 2),), 0),
    "across many": (((6, 9),), 1),
    "in the tail": (((16, 2),), 4),
    "one here, one far": (((8, 2), (13, 2)), 2),
}


def prompt(places: Places, *contents: bytes) -> Prompt:
    items = zip(places, contents * len(places), strict=False)
    media = [MediaItem(start, count, content) for (start, count), content in items]
    return Prompt.of(IDS, SIZE, media)


async def whole(here: World, wanted: Prompt, name: str) -> int:
    """How many tokens were found; then the rest is computed."""
    request = await finish(begin_request(here.service, name, wanted, max_new_tokens=0))
    await here.prefill(request, IDS)
    await here.ended(request)
    return request.cached_tokens


@pytest.mark.parametrize("tier", ["device", "host", "storage"])
@pytest.mark.parametrize("scene", SCENES)
async def test_what_comes_after_another_image_is_found_on_no_tier(scene: str, tier: str) -> None:
    places, before = SCENES[scene]
    through = WritePolicy.WRITE_THROUGH
    async with world(host_write=through, storage_write=through, with_store=True) as here:
        assert await whole(here, prompt(places, CAT), "first") == 0
        if tier == "host":
            await here.service.sleep(keeps_blocks=True)
            await here.service.wake(32)
        elif tier == "storage":
            here.service.reset()
        assert await whole(here, prompt(places, DOG), "another image") == before * SIZE
        assert await whole(here, Prompt.of(IDS, SIZE), "none") == before * SIZE
        assert await whole(here, prompt(places, CAT), "the same") == len(IDS) - 1


async def test_a_ticket_is_for_the_prompt_with_its_images() -> None:
    places = ((3, 6),)
    async with world(with_store=True) as here:
        request = await finish(
            begin_request(here.service, "p", prompt(places, CAT), max_new_tokens=0)
        )
        await here.prefill(request, IDS)
        await finish(publish_request(here.service, request, "ticket", [1]))
        await here.ended(request)
        here.service.reset()
        with pytest.raises(HandoffError, match="prompt"):
            await claim_request(
                here.service,
                "wrong",
                "ticket",
                prompt(places, DOG),
                max_new_tokens=0,
                deadline_s=1.0,
            )
        claimed, _ = await finish(
            claim_request(here.service, "right", "ticket", prompt(places, CAT), max_new_tokens=0)
        )
        await finish(claimed.gate.all_layers(100.0))
        here.check_kv(claimed, IDS, len(IDS))
        await here.ended(claimed)
