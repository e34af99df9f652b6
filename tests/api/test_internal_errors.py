"""A request that fails by a bug of ours is answered 500, and gives back all it had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.nodes import here
from tierkv.engine_runs import ModelRun
from tierkv.errors import DeviceFailedError, TransferError
from tierkv.refmodel.engine import ReferenceEngine
from tierkv.sched import admission
from tierkv.sched.admission import Starts
from tierkv.sched.request import Computing
from tierkv.sched.scheduler import Scheduler
from tierkv.service.session import Session

PROMPT = "a prompt of some words, " * 4


class PlantedError(Exception):
    """What nobody expects."""


@pytest.mark.promise("A request that fails by a bug releases its blocks.")
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (Starts, "_made"),
        (Starts, "_copy_partial"),
        (admission, "_matched"),
        (Computing, "begin"),
        (Scheduler, "_insert"),
        (Scheduler, "_keep_tail"),
        (ModelRun, "add"),
        (ReferenceEngine, "_call_model"),
        (Session, "_set_request"),
        (Session, "has_first_token"),
        (Session, "publish"),
        (Session, "stream"),
    ],
)
async def test_a_request_that_fails_by_a_bug_gives_everything_back(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, fired = getattr(place, name), list[int]()

    def broken(*args: object, **kw: object) -> object:
        if not fired:
            fired.append(1)
            raise PlantedError(name)
        return whole(*args, **kw)

    async with here() as on:
        await on.client.post("/v1/generate", {"prompt": PROMPT, "max_tokens": 3})
        await on.settle()
        monkeypatch.setattr(place, name, broken)
        # The first of them begins like a cached one, in the middle of a block, and differs then.
        bodies = [("/v1/generate", {"prompt": PROMPT[:40] + "other"})]
        bodies += [("/v1/prefill", {"prompt": f"another {PROMPT}", "ticket_id": "t"})]
        statuses = [(await on.client.post(path, body)).status for path, body in bodies]
        assert fired
        assert set(statuses) <= {200, 500}
        await on.settle()
        assert (await on.client.get("/v1/verify")).body == {"findings": []}
        stats = on.node.service.stats()
        assert (stats.running_requests, stats.waiting_requests) == (0, 0)
        answer = await on.client.post("/v1/generate", {"prompt": PROMPT + "x", "max_tokens": 3})
        assert answer.status == 200


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (DeviceFailedError("GPU 0 is lost to this process"), (503, "device_failed")),
        (TransferError("the copy broke"), (503, "transfer_failed")),
        (PlantedError("a bug"), (500, "internal_error")),
    ],
)
async def test_an_error_of_the_engine_has_its_own_code(
    error: Exception, answered: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise error

    async with here() as on:
        monkeypatch.setattr(ReferenceEngine, "_call_model", broken)
        answer = await on.client.post("/v1/generate", {"prompt": PROMPT})
        assert (answer.status, answer.code) == answered
        assert ("GPU 0" in answer.body["detail"]) == (answered[1] == "device_failed")
