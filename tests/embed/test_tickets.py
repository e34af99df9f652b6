"""What an embedding engine's ticket says, and whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.embed.engine import Engine, done, engine
from tests.latch import PATIENCE_S
from tierkv.errors import BadRequestError, DuplicateRequestError, HandoffError

PROMPT = list(range(30))
HOW = {"temperature": "0.7", "seed": "5"}


def publish(here: Engine, tokens: list[int], first: Any, **options: Any) -> Any:
    """The finished call of a request of its own."""
    found = here.cache.admit("one", tokens, max_new_tokens=0).wait(PATIENCE_S)
    here.compute(found, tokens, found.cached_tokens)
    here.cache.commit("one", tokens)
    call = done(here.cache.publish("one", "ticket", first, **options))
    here.cache.end("one").wait(PATIENCE_S)
    return call


def test_tokens_that_were_sampled_in_another_way_are_refused_by_field(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with engine(store=store) as prefill, engine(store=store) as decode:
        assert publish(prefill, PROMPT, [7], sampling=HOW).error is None

        def claim(sampling: dict[str, str] | None) -> Any:
            call = decode.cache.claim("c", "ticket", PROMPT, max_new_tokens=1, sampling=sampling)
            return done(call)

        refused = claim(HOW | {"seed": "6"})
        assert isinstance(refused.error, HandoffError)
        assert refused.error.reason == "incompatible"
        assert "seed" in str(refused.error)
        assert "temperature" not in str(refused.error)
        for ours in (HOW, None):
            found = claim(ours).result()
            assert found.ticket.sampling == HOW
            decode.check(found, PROMPT, len(PROMPT))
            decode.cache.end("c").wait(PATIENCE_S)
        assert prefill.findings() == decode.findings() == []


def test_another_prompt_cannot_take_a_ticket_that_waits_to_be_claimed(tmp_path: Path) -> None:
    with engine(store=f"file://{tmp_path}/store") as here:
        assert publish(here, PROMPT, [7]).error is None
        refused = publish(here, [*PROMPT, 99], [7])
        assert isinstance(refused.error, DuplicateRequestError)
        assert publish(here, PROMPT, [7]).error is None
        assert here.findings() == []


def test_first_tokens_may_be_numpys_and_must_be_tokens(tmp_path: Path) -> None:
    with engine(store=f"file://{tmp_path}/store") as here:
        assert publish(here, PROMPT, np.array([7, 8])).result().ticket.first_tokens == (7, 8)
        cache: Any = here.cache
        for wrong in ([-1], [2**31], [2**70], [1.5]):
            with pytest.raises(BadRequestError):
                cache.publish("one", "ticket", wrong)
        for sampling in (7, {"seed": 5}, {5: "seed"}, {"seed": "\ud800"}):
            with pytest.raises(BadRequestError):
                cache.publish("one", "ticket", [7], sampling=sampling)
            with pytest.raises(BadRequestError):
                cache.claim("one", "ticket", PROMPT, max_new_tokens=1, sampling=sampling)
        for name in ("\ud800", "a\udfff"):
            with pytest.raises(BadRequestError):
                cache.claim("one", name, PROMPT, max_new_tokens=1)
            with pytest.raises(BadRequestError):
                cache.publish("one", name, [7])
        assert here.findings() == []
