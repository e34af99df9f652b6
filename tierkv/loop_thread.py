"""An event loop in a thread, for programs that have no event loop of their own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - registers an exit hook: see the end
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import uvloop

from tierkv.errors import ConfigError, ShuttingDownError
from tierkv.tasks import task_group
from tierkv.threads import start_thread, start_threads

T = TypeVar("T")

log = logging.getLogger(__name__)


class LoopClosedError(ShuttingDownError):
    """The thread accepts no work: it is not open, is closing, or belongs to the parent process."""


class LoopThread:
    """A daemon thread with an event loop that runs from `open` until `close`.

    Every method may be called from any thread. The child of a fork has no such thread, so all work
    is refused there. At the interpreter's exit, the thread is closed before Python shuts its thread
    pools down.

    Args:
        what: noun for the thread in error messages, such as "page storage".
        lifetime: makes the context manager that the loop enters at `open` and exits at `close`.
        name: name of the thread.
        close_s: seconds that `close` waits for the thread to end, if its caller sets no other
            limit.
        grace_s: seconds that running work may continue after `close` before it is cancelled; None
            for no limit.
        on_end: called last on the thread, with the error that ended it; None for no error.
        on_fork: called in the child process after a fork.
    """

    def __init__(  # noqa: PLR0913 - a lifetime, its names and its limits
        self,
        what: str,
        lifetime: Callable[[], AbstractAsyncContextManager[object]],
        *,
        name: str,
        close_s: float,
        grace_s: float | None = None,
        on_end: Callable[[BaseException | None], None] = lambda _: None,
        on_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self._what = what
        self._lifetime = lifetime
        self._name = name
        self._close_s = close_s
        self._grace_s = grace_s
        self._on_end = on_end
        self._on_fork = on_fork
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._opened, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # protects the next fields, and each hand-over to the loop
        self._accepts_work = self._is_close_asked = False
        self._pending: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._is_forked = False

    def open(self, timeout_s: float) -> bool:
        """Start the thread and its event loop, and wait until it is ready for work.

        The thread first enters the context manager that the argument `lifetime` of the class makes.

        Args:
            timeout_s: seconds to wait. After this time the thread begins to close.

        Returns:
            True if the thread accepts work now; False if the time was not enough, or if another
                thread asked it to close.

        Raises:
            ConfigError: the thread was opened before, or the system cannot start another thread.
            BaseException: the error that the context manager raised when it was entered.
        """
        if self._thread is not None:
            raise ConfigError(
                f"this {self._what} was opened before and cannot be opened again: make another one"
            )
        _open.add(self)
        self._thread = start_thread(self._live, self._name)
        if not self._opened.wait(timeout_s):
            self.ask_to_close()
            return False
        error = self.pop_error()
        if error is not None:
            raise error
        return self._accepts_work

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse further work, wait for running work, and end the thread.

        The thread exits its context manager (`lifetime`) last. The method may be called again, for
        example to wait longer.

        Args:
            timeout_s: seconds to wait; None for the `close_s` of this thread.

        Returns:
            True if the thread has ended or was never opened; False if it is still closing after the
                wait. A call on the thread itself, or in the child process of a fork, returns True
                without a wait.
        """
        self.ask_to_close()
        if self._thread is None or self._is_forked or self._thread is threading.current_thread():
            return True
        if not self._ended.wait(self._close_s if timeout_s is None else timeout_s):
            return False
        self._thread.join()
        return True

    def ask_to_close(self) -> None:
        """Begin to close, and return without waiting."""
        with self._lock:
            self._accepts_work, self._is_close_asked = False, True
        self.call(self._closing.set)

    @property
    def is_open(self) -> bool:
        """True if `run` accepts work now."""
        return self._accepts_work

    def pop_error(self) -> BaseException | None:
        """Return the error that ended the thread, and forget the error.

        The result is None if no error ended the thread, and in later calls.
        """
        error, self._error = self._error, None
        return error

    def call(self, callback: Callable[[], object]) -> bool:
        """Make the loop run `callback` soon, and return at once.

        Returns:
            True if the loop accepted `callback`; False if the loop does not run.
        """
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop was closed in this moment
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` in a task on the loop, and return the future of its result.

        Returns:
            The future, which is completed in any case. It raises LoopClosedError if the thread
                accepts no work, or ends before `work` does. Cancelling the future cancels `work`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._accepts_work:
                self._pending[future] = work
                self.call(partial(self._start, future, work))
                return future
        work.close()
        future.set_exception(LoopClosedError(f"this {self._what} is closed, or was not opened"))
        return future

    # On the thread

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main())
        except BaseException as error:
            self._error = error
            if self._opened.is_set():
                log.error("this %s has failed: %s", self._what, error, exc_info=error)
        finally:
            with self._lock:
                self._loop, self._accepts_work = None, False
            for future, work in self._pending.items():
                work.close()
                self._refuse(future)
            self._on_end(self._error)
            _open.discard(self)
            self._opened.set()
            self._ended.set()

    async def _main(self) -> None:
        await start_threads()
        async with self._lifetime(), task_group() as self._group:
            with self._lock:
                if self._is_close_asked:
                    return
                self._accepts_work = True
            self._opened.set()
            try:
                await self._closing.wait()
            finally:  # a lifetime that fails cancels the wait
                self._accepts_work = False
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._grace_s)
            for task in self._tasks:
                task.cancel()

    def _start(self, future: Future[Any], work: Coroutine[Any, Any, Any]) -> None:
        outcome = _outcome(work)
        try:
            task = self._group.create_task(outcome, name=self._name)
        except RuntimeError:  # the group is ending, and `_live` refuses what is pending
            outcome.close()
            return
        self._tasks.add(task)
        # Not in the task: a task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(partial(self._answer, future))
        future.add_done_callback(lambda done: done.cancelled() and self.call(task.cancel))

    def _answer(self, future: Future[Any], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._pending.pop(future).close()
        if task.cancelled():
            self._refuse(future)
        elif future.set_running_or_notify_cancel():
            result, error = task.result()
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _refuse(self, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            text = f"this {self._what} was closed before the call was done"
            future.set_exception(LoopClosedError(text))

    # Forks and the interpreter's exit

    def forked(self) -> None:
        """Mark the thread as closed; called in the child of a fork, which has no such thread."""
        self._is_forked, self._accepts_work, self._loop = True, False, None
        # A new lock: a thread of the parent may hold the old one, which is then never released.
        self._lock, self._pending = threading.Lock(), {}
        self._on_fork()

    def exiting(self) -> None:
        """Close this thread at the exit of the interpreter, and log a warning if it does not end.

        Python calls this before it shuts down the thread pools that closing needs.
        """
        if not self.close():
            log.warning(
                "this %s is still open at the exit of the process: close it before", self._what
            )


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    """Return the error as a value, so that it does not cancel the task group."""
    try:
        return await work, None
    except Exception as error:  # noqa: BLE001 - the future raises it
        return None, error


_open: WeakSet[LoopThread] = WeakSet()


def _fork() -> None:
    for thread in list(_open):
        thread.forked()
    _open.clear()


def _exit() -> None:
    for thread in list(_open):
        thread.exiting()


def _before_thread_pools_end(call: Callable[[], None]) -> None:
    # `atexit` is too late for that. These hooks run in reverse order of registration, and the
    # import above has registered the hook of the thread pools before.
    early: Callable[[Callable[[], None]], object] | None = vars(threading).get("_register_atexit")
    (early or atexit.register)(call)


os.register_at_fork(after_in_child=_fork)
_before_thread_pools_end(_exit)
