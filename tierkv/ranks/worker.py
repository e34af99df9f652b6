"""The worker's side: carries out a scheduler's plans on the tensors of this process."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

from tierkv.errors import ConfigError, StoreCorruptError, TierKVError
from tierkv.gpu.protocol import BlockCopy, Device, Direction, Event, Lane, Planes
from tierkv.ranks.link import (
    Alive,
    Kind,
    Link,
    LinkClosedError,
    Plan,
    Report,
    connect,
    read,
)
from tierkv.ranks.memory import SharedSlots, join

log = logging.getLogger(__name__)

BEAT_S = 1.0
_COPY_DEADLINE_S = 600.0


class Worker:
    """Rank `rank` of the scheduler that listens at `path`, with the KV of `planes` on `device`.

    Planes are the engine's own (`EnginePlanes`, or those a CUDA device has adopted). Call `serve`
    on a thread of its own; it returns when the scheduler has gone. Copies come after all that the
    device's compute stream had been given when their plan arrived.
    """

    def __init__(self, path: str, rank: int, device: Device, planes: Planes) -> None:
        self._path = path
        self._rank = rank
        self._device = device
        self._planes = planes
        self._link: Link | None = None
        self._ended = threading.Event()

    def serve(self) -> None:
        """Carry out plans until the scheduler closes its end or `stop` is called.

        Raises ConfigError if nobody listens at the path, or does not take this worker, and
        StoreCorruptError if what comes from there cannot be read.
        """
        link = self._link = connect(self._path)
        try:
            if self._ended.is_set():
                return  # it was stopped before there was a link to shut down
            host = self._join(link)
            try:
                self._carry_out(link, host)
            finally:
                host.close()
        except ConfigError:
            if not self._ended.is_set():
                raise
        finally:
            link.close()

    def _join(self, link: Link) -> SharedSlots:
        try:
            hosts, _, _ = join(link, self._rank, [self._planes])
        except LinkClosedError as error:
            text = f"the scheduler did not take worker {self._rank}: {error}"
            raise ConfigError(text) from error
        return hosts[0]

    def stop(self) -> None:
        """Let `serve` return; to the scheduler this worker is dead then."""
        self._ended.set()
        if self._link is not None:
            self._link.shutdown()

    def _carry_out(self, link: Link, host: SharedSlots) -> None:
        lanes = {one: self._device.open_lane(one, self._planes, host) for one in Direction}
        beat = threading.Thread(target=self._beat, args=(link,), name="tierkv-beat", daemon=True)
        beat.start()
        # Reports of one lane in the order of its copies, and no lane waits for another's.
        waiters = {kind: ThreadPoolExecutor(1, f"tierkv-{kind}") for kind in get_args(Kind)}
        try:
            records = link.pending()
            while True:
                for record in records:
                    self._begin(record, link, lanes, waiters)
                records = link.receive()
        except LinkClosedError as error:
            log.info("worker %d ends: %s", self._rank, error)
        finally:
            self._ended.set()
            for lane in lanes.values():
                lane.close()
            for waiter in waiters.values():
                waiter.shutdown(wait=True)
            beat.join()

    def _begin(
        self,
        record: bytes,
        link: Link,
        lanes: dict[Direction, Lane],
        waiters: dict[str, ThreadPoolExecutor],
    ) -> None:
        plan = read(record)
        if not isinstance(plan, Plan):
            raise StoreCorruptError("a worker that serves is sent nothing but plans")
        try:
            event = self._submit(plan, lanes)
        except TierKVError as error:
            link.send(Report(plan.number, str(error)))
            return
        waiters[plan.kind].submit(_report, link, plan.number, event)

    def _submit(self, plan: Plan, lanes: dict[Direction, Lane]) -> Event:
        source, target = plan.slots()
        if plan.kind == "copy":
            return self._device.copy_blocks(self._planes, source, target)
        after = (self._device.compute_stream.record(),)
        if plan.kind == "load":
            copy = BlockCopy(Direction.LOAD, source, target, after)
        else:
            copy = BlockCopy(Direction.OFFLOAD, target, source, after)
        return lanes[copy.direction].submit(copy)[-1]

    def _beat(self, link: Link) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                link.send(Alive())
            except LinkClosedError:
                return


def _report(link: Link, number: int, event: Event) -> None:
    problem = None
    try:
        event.block_until_done(_COPY_DEADLINE_S)
    except TierKVError as error:
        problem = str(error)
    try:
        link.send(Report(number, problem))
    except LinkClosedError as error:
        log.warning("nobody heard that plan %d was carried out: %s", number, error)


def serve_in_thread(worker: Worker) -> threading.Thread:
    """Start `worker.serve` on a daemon thread: an engine's process may end without asking it."""

    def serve() -> None:
        try:
            worker.serve()
        except TierKVError as error:
            log.error("the worker has ended: %s", error)

    thread = threading.Thread(target=serve, name="tierkv-worker", daemon=True)
    thread.start()
    return thread
