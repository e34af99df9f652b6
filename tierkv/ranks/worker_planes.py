"""Copies by the ranks of an engine that has allocated its device blocks itself.

The engine's step messages carry plans of copies to the ranks, and its outputs carry reports back.
Over a Unix socket, each rank in another process receives the memory of the host slots once. The end
of the connection later shows that the rank has ended.

    scheduler's process: RankSocket                     worker's process: WorkerPlanes
    listens once there is memory  <---- Hello --------  connect(): retries until it listens
    the file of all host slots    ----- SharedMemory -> maps its own bytes of each slot
    fails the rank's open plans   <---- end of link --  close(), or death
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tierkv.cache.layout import Layout
from tierkv.errors import (
    ConfigError,
    GateTimeoutError,
    StoreCorruptError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import BlockCopy, Device, Direction, Event, HostSlots, Lane, Planes
from tierkv.ranks.link import (
    Goodbye,
    Hello,
    HostRegion,
    Link,
    LinkClosedError,
    Plan,
    SharedMemory,
    WorkerRefused,
    connect,
    listen,
    read,
    receive_hello,
)
from tierkv.ranks.memory import SharedSlots, digest_of, join, pieces, side_by_side

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.05  # pause between two attempts of a worker to reach the scheduler
_ANSWER_S = 5.0  # time limit from the connection to the hello, and from there to the answer
_ENDED = "its process has ended"
_LAST_COPY_S = 60.0
_END_S = 5.0  # time limit from the end of a process's connection to the end of the process


class Finished(msgspec.Struct, frozen=True):
    """A rank's report that a plan of copies has ended.

    Attributes:
        number: number of the plan.
        rank: number of the rank.
        problem: the reason why the plan failed; None if it succeeded.
    """

    number: int
    rank: int = 0
    problem: str | None = None


@dataclass(slots=True, eq=False)
class _Copies:
    """The copies that one plan has started on this rank.

    Attributes:
        events: by number of the cache group, the events of its copies that have not ended, one for
            each layer.
        problem: the reason why a copy failed or could not begin; None if all succeeded so far.
    """

    events: dict[int, tuple[Event, ...]] = field(default_factory=dict)
    problem: str | None = None

    def are_done(self) -> bool:
        """Return True if all copies have ended, after which `problem` does not change."""
        for group, events in list(self.events.items()):
            try:
                if not events[-1].is_done:
                    return False
            except TransferError as error:
                self.problem = self.problem or str(error)
            del self.events[group]
        return True


class WorkerPlanes:
    """One rank's KV tensors, and the copies between them and the host slots.

    The engine's thread calls the methods. A plan can arrive before this rank has its host slots;
    the plan's copies begin once it has them.

    Args:
        device: the device of the planes.
        planes: the engine's own planes of each KV cache group: `EnginePlanes`, or planes that a
            CUDA device has adopted.
        rank: number of this rank.
    """

    def __init__(self, device: Device, planes: Planes | Sequence[Planes], *, rank: int = 0) -> None:
        self._device = device
        self._planes = tuple(planes) if isinstance(planes, Sequence) else (planes,)
        self._rank = rank
        # Protects the fields below; held no longer than a submission. Acquired directly, not by
        # `_changed`: a Ctrl-C within Condition's Python code would leave the lock acquired.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._hosts: Sequence[HostSlots] = ()
        self._lanes: dict[tuple[int, Direction], Lane] = {}
        self._saves = True
        self._waiting: dict[int, dict[int, BlockCopy]] = {}
        self._open: dict[int, _Copies] = {}
        # The reason why all plans are refused; None if they are not.
        self._problem: str | None = None
        self._held = ExitStack()  # closes the lanes and the host slots
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._has_ended = threading.Event()  # no copy runs, and none begins any more
        self._unreported: tuple[Finished, ...] = ()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each KV cache group."""
        return tuple(one.layout for one in self._planes)

    @property
    def is_attached(self) -> bool:
        """True if this rank has its host slots, so that copies begin at once."""
        return bool(self._lanes)

    def attach(self, hosts: HostSlots | Sequence[HostSlots], *, saves: bool = True) -> None:
        """Use these host slots from now on, and start the copies that waited for host slots.

        Args:
            hosts: host slots of each KV cache group.
            saves: False if another rank saves the same bytes. This rank then saves nothing, and
                reports each plan to save as ended at once.
        """
        hosts = self._hosts = hosts if isinstance(hosts, Sequence) else (hosts,)
        lanes = {}
        for group, (planes, host) in enumerate(zip(self._planes, hosts, strict=True)):
            for direction in Direction:
                lane = self._device.open_lane(direction, planes, host)
                self._held.callback(lane.close)
                lanes[group, direction] = lane
        with self._lock:
            self._lanes, self._saves = lanes, saves
            while self._waiting:
                number = next(iter(self._waiting))
                self._submit(number, self._waiting.pop(number))
            self._changed.notify_all()

    def connect(self, path: str, connect_deadline_s: float = 60.0) -> None:
        """Start a thread that gets the host slots from the `RankSocket` at `path`.

        The thread retries until a `RankSocket` listens there.

        Args:
            path: path of the Unix socket.
            connect_deadline_s: seconds after which a rank without host slots refuses all plans.

        Raises:
            ConfigError: this rank has host slots already, or is connecting.
        """
        if self._thread is not None or self._lanes:
            raise ConfigError(f"rank {self._rank} is attached already")
        deadline = time.monotonic() + connect_deadline_s
        self._thread = threading.Thread(
            target=self._live, args=(path, deadline), name="tierkv-rank", daemon=True
        )
        self._thread.start()

    # The engine's thread

    def start_loads(self, plan: Plan, after: Sequence[Event] = ()) -> None:
        """Start to copy host slots to the engine's blocks.

        Args:
            plan: the slots and blocks.
            after: events of the kernels that still use the former content of the blocks; () for
                everything submitted to the compute stream so far.
        """
        self._start(plan, Direction.LOAD, after)

    def start_saves(self, plan: Plan, after: Sequence[Event] = ()) -> None:
        """Start to copy the engine's blocks to host slots, after the kernels that write the blocks.

        Args:
            plan: the slots and blocks.
            after: events of these kernels; () for everything submitted to the compute stream so
                far.
        """
        self._start(plan, Direction.OFFLOAD, after)

    def _start(self, plan: Plan, direction: Direction, after: Sequence[Event]) -> None:
        copies, problem = {}, None
        try:
            before = tuple(after) or (self._device.compute_stream.record(),)
            for group, source, target in plan.parts():
                is_load = direction is Direction.LOAD
                slots, blocks = (source, target) if is_load else (target, source)
                copies[group] = BlockCopy(direction, slots, blocks, before)
        except TierKVError as error:  # reported as a copy that fails later
            problem = str(error)
        with self._lock:
            problem = problem or self._problem
            if problem is not None:
                self._open[plan.number] = _Copies(problem=problem)
            elif self._lanes:
                self._submit(plan.number, copies)
            else:
                self._waiting[plan.number] = copies

    def _submit(self, number: int, copies: dict[int, BlockCopy]) -> None:
        begun = self._open[number] = _Copies()
        for group, copy in copies.items():
            if copy.direction is Direction.OFFLOAD and not self._saves:
                continue
            try:
                begun.events[group] = self._lanes[group, copy.direction].submit(copy)
            except TierKVError as error:
                begun.problem = str(error)
                return

    def wait_layer(self, number: int, layer: int, timeout_s: float, *, group: int = 0) -> None:
        """Make the compute stream wait until a load has copied one layer of a KV cache group.

        Args:
            number: number of the plan.
            layer: number of the layer in its group.
            timeout_s: seconds to wait.
            group: number of the group.

        Raises:
            TransferError: the load failed.
            GateTimeoutError: the layer or the host slots did not arrive in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if not self._changed.wait_for(lambda: number not in self._waiting, timeout_s):
                raise GateTimeoutError(f"the scheduler sent no host slots within {timeout_s:g} s")
            begun = self._open.get(number)
            problem = begun.problem if begun is not None else None
            events = begun.events.get(group) if begun is not None else None
        if problem is not None:
            raise TransferError(problem)
        if events is not None:
            self._device.compute_stream.wait(events[layer], max(deadline - time.monotonic(), 0.0))

    def wait(self, number: int, timeout_s: float) -> None:
        """Block until a plan has ended or `timeout_s` has passed; `finished` returns the outcome.

        Args:
            number: number of the plan.
            timeout_s: upper limit of the wait in seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._changed.wait_for(lambda: number not in self._waiting, timeout_s)
            begun = self._open.get(number)
            events = [one[-1] for one in begun.events.values()] if begun is not None else []
        for event in events:
            with suppress(GateTimeoutError, TransferError):
                event.block_until_done(max(deadline - time.monotonic(), 0.0))

    def replace(self, planes: Planes | Sequence[Planes]) -> None:
        """Use other tensors from now on, with the same layouts as the present ones.

        No copy may be running. The host slots must have been passed to `attach`. If they came from
        the scheduler's process (`connect`), the tensors cannot be replaced.

        Args:
            planes: the new tensors, one object for each cache group.
        """
        self._held.close()
        self._planes = tuple(planes) if isinstance(planes, Sequence) else (planes,)
        self.attach(self._hosts, saves=self._saves)

    def finished(self) -> list[Finished]:
        """Return a report for each plan that has ended, each once. Never blocks."""
        done = []
        with self._lock:
            for number, begun in list(self._open.items()):
                if begun.are_done():
                    del self._open[number]
                    done.append(Finished(number, self._rank, begun.problem))
        return done

    def close(
        self, unreported: Sequence[Finished] = (), *, is_process_ending: bool = False
    ) -> None:
        """Wait until all running copies have ended, and release the host slots.

        The scheduler receives the outcomes of these copies over the connection. `finished` returns
        the outcomes, too. Further calls do nothing.

        Args:
            unreported: reports that `finished` has returned and the engine has not passed to the
                scheduler, because the engine runs no further step. They are sent over the
                connection.
            is_process_ending: True to return once the copies have ended, before the host slots are
                released. Unpinning many of them takes seconds, and the kernel does it when the
                process ends.
        """
        self._unreported = tuple(unreported)
        self._closing.set()
        self._refuse("these planes are closed")
        if self._thread is None:
            self._held.close()
            return
        if self._link is not None:
            self._link.stop_receiving()
        if is_process_ending:
            self._has_ended.wait()
        else:
            self._thread.join()

    # The connection's thread

    def _live(self, path: str, deadline: float) -> None:
        try:
            self._live_until_closed(path, deadline)
        finally:
            self._has_ended.set()

    def _live_until_closed(self, path: str, deadline: float) -> None:
        try:
            link = self._reach(path, deadline)
        except TierKVError as error:
            if not self._closing.is_set():
                log.error("rank %d has no host slots: %s", self._rank, error)
            self._refuse(f"rank {self._rank} has no host slots: {error}")
            return
        try:
            while not self._closing.is_set():
                link.receive()  # returns when the scheduler ends, since it sends nothing more
        except LinkClosedError:
            self._refuse(f"the connection to the cache at {path} was lost")
        with self._lock:
            events = [events for one in self._open.values() for events in one.events.values()]
        for of_group in events:
            with suppress(GateTimeoutError, TransferError):
                of_group[-1].block_until_done(_LAST_COPY_S)
        with self._lock:
            ended = [(number, one.problem) for number, one in self._open.items() if one.are_done()]
        reported = [(report.number, report.problem) for report in self._unreported]
        with suppress(LinkClosedError):  # the scheduler may have ended before
            link.send(Goodbye((*reported, *ended)))
        self._has_ended.set()
        self._held.close()
        link.close()

    def _reach(self, path: str, deadline: float) -> Link:
        """Connect to the service at the socket `path`, and receive the host slots for this rank.

        If no connection is possible or the service closes it, retry until `deadline`
        (time.monotonic).
        """
        while True:
            try:
                link = self._link = connect(path, _ANSWER_S)
            except ConfigError:
                if self._closing.wait(_ASK_AGAIN_S) or time.monotonic() > deadline:
                    raise
                continue
            try:
                self._join(link)
            except BaseException as error:
                self._held.close()
                link.close()
                is_unsaid = isinstance(error, LinkClosedError) and time.monotonic() < deadline
                if not is_unsaid or self._closing.wait(_ASK_AGAIN_S):
                    raise
            else:
                return link

    def _join(self, link: Link) -> None:
        hosts, life, saves = join(link, self._rank, self._planes)
        if life is not None:
            self._held.callback(os.close, life)
        for host in hosts:
            self._held.callback(host.close)
        self.attach(hosts, saves=saves)

    def _refuse(self, problem: str) -> None:
        with self._lock:
            self._problem = self._problem or problem
            for number in self._waiting:
                self._open[number] = _Copies(problem=self._problem)
            self._waiting.clear()
            self._changed.notify_all()


class RankSocket:
    """The socket over which ranks in other processes receive their bytes of the host slots.

    `EngineCache(ranks=...)` uses it. A rank is lost if its connection has ended, for any reason, or
    if the rank has not connected in time. A lost rank cannot connect again, because copies of its
    old process could overlap with those of a new process.

    Args:
        path: path of the Unix socket, open to processes of this user alone; its directory should be
            private.
        shards: one element per rank: a layout, or a sequence of layouts with one for each KV cache
            group. If blocks are split over the ranks, the layout is that of the rank's slice, and
            `side_by_side(shards)` is the layout of the block. If all ranks have whole, equal
            blocks, each layout is that of the block: all ranks load, and only rank 0 saves.
        connect_deadline_s: seconds after which a rank that has not connected is lost.

    Attributes:
        lost: the reason why a rank is lost, by the rank's number, for each lost rank; any thread
            may read it.
        num_ranks: number of ranks.
    """

    def __init__(
        self,
        path: str,
        shards: Sequence[Layout | Sequence[Layout]],
        *,
        connect_deadline_s: float = 60.0,
    ) -> None:
        self.lost: dict[int, str] = {}  # replaced, never changed, since any thread may read it
        self._last_reports: deque[Finished] = deque()  # from the goodbyes of ranks
        self._all_lost = threading.Event()
        self.num_ranks = len(shards)
        self._path = path
        self._shards = [(one,) if isinstance(one, Layout) else tuple(one) for one in shards]
        self._deadline_s = connect_deadline_s
        self._links: dict[int, Link] = {}
        self._ends: dict[int, int] = {}  # descriptors of the ranks' processes
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._has_failed_to_accept = False  # the last connection could not be accepted

    def shards(self, group: int) -> list[Layout]:
        """Return the layout of each rank for the KV cache group number `group`."""
        return [one[group] for one in self._shards if group < len(one)]

    def check(self, layouts: Sequence[Layout]) -> None:
        """Check that the ranks' shards make up whole blocks of all KV cache groups.

        Args:
            layouts: the layout of a whole block of each group.

        Raises:
            ConfigError: the shards do not make up `layouts`.
        """
        self._pieces(layouts)

    def _pieces(self, layouts: Sequence[Layout]) -> list[list[slice]]:
        if not self._shards or {len(shards) for shards in self._shards} != {len(layouts)}:
            raise ConfigError(
                f"there must be at least one rank, and each must have {len(layouts)} "
                "groups of layers"
            )
        of_groups = list(zip(*self._shards, strict=True))
        pairs = list(zip(layouts, of_groups, strict=True))
        if all(one.digest == layout.digest for layout, shards in pairs for one in shards):
            return [[slice(0, one.block_bytes)] * self.num_ranks for one in layouts]
        for layout, shards in pairs:
            if side_by_side(shards).digest != layout.digest:
                raise ConfigError(
                    "the ranks' shards do not make up the cache's layout: pass the "
                    "layout side_by_side(shards), or shards equal to the layout"
                )
        return [pieces(shards) for shards in of_groups]

    @property
    def failure(self) -> str | None:
        """The reason why one of the lost ranks is lost; None if no rank is lost."""
        return next(iter(self.lost.values())) if self.lost else None

    def open(
        self, layouts: Sequence[Layout], hosts: Sequence[SharedSlots], *, life: int | None = None
    ) -> None:
        """Listen on the Unix socket, and send the host slots to each rank that connects.

        Args:
            layouts: the layout of a whole block of each KV cache group.
            hosts: the host slots of each group.
            life: a file descriptor that each rank keeps open while it may copy, so that other
                processes can find out when its copies are over; None for none.

        Raises:
            ConfigError: the socket's path cannot be bound, or the ranks' shards together are not a
                block of `layouts`.
        """
        regions = [
            [HostRegion(host.num_slots, layout.block_bytes, one.start, one.stop) for one in parts]
            for layout, host, parts in zip(layouts, hosts, self._pieces(layouts), strict=True)
        ]
        is_same = self.num_ranks > 1 and regions[0][0] == regions[0][1]
        self._answers = [
            SharedMemory(of_rank, saves=not (rank and is_same), has_life=life is not None)
            for rank, of_rank in enumerate(zip(*regions, strict=True))
        ]
        self._descriptors = [host.descriptor for host in hosts] + ([] if life is None else [life])
        self._listener = listen(self._path)
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="tierkv-ranks", daemon=True)
        self._thread.start()

    def pop_reports(self) -> list[Finished]:
        """Return the reports of ended copies that ranks sent before they disconnected, each once.

        Read `lost` before this call: the last reports of every rank in it are then in a result of
        this method.
        """
        reports = []
        while self._last_reports:
            reports.append(self._last_reports.popleft())
        return reports

    def wait_until_lost(self, timeout_s: float) -> None:
        """Block until all ranks have disconnected. Their last reports have then arrived.

        Args:
            timeout_s: seconds after which the call returns in any case.
        """
        if self._thread is not None:
            self._all_lost.wait(timeout_s)

    def close(self) -> None:
        """Close the connections to all ranks. Further calls do nothing."""
        if self._thread is None:
            return
        self._stop.close()
        self._thread.join()
        self._thread = None

    # The thread

    def _serve(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._stopped, selectors.EVENT_READ)
            while True:
                missing = set(range(self.num_ranks)) - self._links.keys() - self.lost.keys()
                wait_s = max(deadline - time.monotonic(), 0.0) if missing else None
                for key, _ in self._selector.select(wait_s):
                    if key.data is None:
                        return
                    key.data()
                if missing and time.monotonic() > deadline:
                    for rank in missing - self._links.keys():
                        self._lose(rank, f"it did not connect within {self._deadline_s:g} s")
        finally:
            self._close_links()

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:  # for example no free descriptor; the rank is accepted later
            if not self._has_failed_to_accept:
                log.error("no rank can connect at %s at the moment: %s", self._path, error)
            self._has_failed_to_accept = True
            time.sleep(_ASK_AGAIN_S)
            return
        self._has_failed_to_accept = False
        try:
            link, hello = receive_hello(end, _ANSWER_S)
        except (LinkClosedError, StoreCorruptError) as error:
            log.warning("a connection at %s was refused: %s", self._path, error)
            return
        rank = hello.rank
        reason = self._why_not(hello)
        try:
            if reason is not None:
                log.error("%s", reason)
                link.send(WorkerRefused(reason))
                link.close()
                return
            link.send(self._answers[rank], descriptors=self._descriptors)
        except LinkClosedError as error:  # the rank may connect again
            log.warning("rank %d disconnected before it received its host slots: %s", rank, error)
            link.close()
            return
        self._links[rank] = link
        self._selector.register(link, selectors.EVENT_READ, partial(self._receive, rank))
        with suppress(OSError, AttributeError):  # a system without pidfd
            self._ends[rank] = os.pidfd_open(link.peer_pid())
            self._selector.register(
                self._ends[rank], selectors.EVENT_READ, partial(self._lose, rank, _ENDED)
            )

    def _why_not(self, hello: Hello) -> str | None:
        rank = hello.rank
        if not 0 <= rank < self.num_ranks or rank in self._links:
            return (
                f"rank {rank} was refused: it is connected already, or is not one of ranks "
                f"0 to {self.num_ranks - 1}"
            )
        if rank in self.lost:
            return f"{self.lost[rank]}: restart the engine"
        if hello.layout_digest != digest_of(self._shards[rank]):
            return (
                f"rank {rank} was refused: its layout differs from the shard that the "
                "cache has for it"
            )
        return None

    def _receive(self, rank: int) -> None:
        link = self._links.get(rank)
        if link is None:
            return  # the end of its process was noticed before
        try:
            records = [read(one) for one in link.receive()]
        except (LinkClosedError, StoreCorruptError) as error:
            if rank in self._ends:  # its copies end with the process, not with the connection
                select.select([self._ends[rank]], [], [], _END_S)
            self._lose(rank, str(error))
            return
        for one in records:
            if isinstance(one, Goodbye):
                self._last_reports.extend(Finished(of, rank, why) for of, why in one.finished)
        if any(isinstance(one, Goodbye) for one in records):
            self._lose(rank, "it has closed its planes", level=logging.INFO)

    def _lose(self, rank: int, why: str, *, level: int = logging.WARNING) -> None:
        if rank in self.lost:
            return
        process = ""
        link = self._links.pop(rank, None)
        if link is not None:
            process = f" (process {link.peer_pid()})"
            self._selector.unregister(link)
            link.close()
        end = self._ends.pop(rank, None)
        if end is not None:
            self._selector.unregister(end)
            os.close(end)
        text = f"rank {rank}{process} is lost: {why}"
        log.log(level, "%s", text)
        self.lost = self.lost | {rank: text}
        if len(self.lost) == self.num_ranks:
            self._all_lost.set()

    def _close_links(self) -> None:
        self._selector.close()
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        for link in self._links.values():
            link.close()
        for end in self._ends.values():
            os.close(end)
        self._stopped.close()
