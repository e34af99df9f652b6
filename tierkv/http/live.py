"""The live page of a node or a gateway: its files, and the stream of the metrics that it shows.

    LiveFeed.figures(), twice a second -> ring buffer of encoded samples -> every open page

The figures are values of GET /metrics. Samples are taken even while no page is open, so that a new
page shows the last minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

import msgspec
from aiohttp import hdrs, web
from prometheus_client.metrics_core import Metric

from tierkv.http import bodies
from tierkv.http.bodies import event_stream, open_stream, write
from tierkv.http.callers import Access
from tierkv.http.route import Route, in_path
from tierkv.tasks import supervised
from tierkv.threads import in_thread

log = logging.getLogger(__name__)

EVERY_S = 0.5
MAX_SAMPLES = 1200  # ten minutes, some 0.5 MB
REFRESH_S = 2.0
_WRITE_S = 10.0  # seconds without a read after which a browser is dropped; it reconnects by itself

News = Callable[[], Iterable[tuple[str, bytes]]]


def figures_of(metrics: Iterable[Metric], families: Collection[str]) -> dict[str, float]:
    """Return the values of the metrics named in `families`.

    Args:
        metrics: All metrics.
        families: Names of the metrics to return, without labels.

    Returns:
        The values, by name and labels as in GET /metrics.
    """
    return {
        _name(sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in metrics
        if family.name in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@cache  # bounded: the process itself chooses all label values
def _name(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    pairs = ",".join(f'{key}="{value}"' for key, value in labels)
    return f"{name}{{{pairs}}}" if pairs else name


class LiveFeed:
    """The data of the live page: the latest samples of metrics, and a stream to each open page.

    Use this object inside its `running()`.

    Attributes:
        figures: Function that returns the values of the metrics by name. If the names change, all
            earlier samples are dropped.
        refresh: Coroutine function that collects data for the page that are too slow to collect at
            each sample. While a page is open, the feed calls it again and again; its result is the
            seconds until the next call.
        num_watching: Number of open streams.
    """

    def __init__(self) -> None:
        self.figures: Callable[[], Mapping[str, float]] = dict
        self.refresh: Callable[[], Awaitable[float]] = _nothing
        self.num_watching = 0
        self._ring: deque[bytes] = deque(maxlen=MAX_SAMPLES)
        self._names: tuple[str, ...] = ()
        self._epoch = 0
        self._last = 0  # number of the newest sample; numbers have no gaps
        self._is_closed = False
        self._changed = asyncio.Event()
        self._watched = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take samples of the metrics while this context is entered.

        The exit ends the streams to all pages that are open in browsers; the last event of each
        stream is `end`.
        """
        self._is_closed = False
        self._begin_anew()
        work = {"tierkv-live": self._sample, "tierkv-live-refresh": self._refresh}
        async with supervised(work):
            try:
                yield
            finally:
                self._is_closed = True
                self._wake()

    def sample(self) -> None:
        """Read all metrics now, and send the values to the open live pages."""
        values = self.figures()
        if tuple(values) != self._names:
            self._begin_anew()
            self._names = tuple(values)
        self._ring.append(msgspec.json.encode([round(time.time(), 3), *values.values()]))
        self._last += 1
        self._wake()

    def _begin_anew(self) -> None:
        self._ring.clear()
        self._epoch, self._last = self._epoch + 1, 0

    async def _sample(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(EVERY_S)

    async def _refresh(self) -> None:
        while True:
            await self._watched.wait()
            await asyncio.sleep(await self.refresh())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def stream(self, request: web.BaseRequest, news: News) -> web.StreamResponse:
        """Stream samples of metrics, and other events, to one live page as server-sent events.

        The stream begins with the samples that are kept, and ends with `running`. A page that reads
        too slowly gets several samples in one event. Samples that are deleted before the page reads
        are not sent.

        Args:
            request: The request of the page.
            news: Function that returns the name and the data of each other event that this page has
                not received yet.
        """
        if request.method == hdrs.METH_HEAD:  # the client would take a body for the next answer
            return event_stream(request)
        epoch, number = -1, 0
        response = await open_stream(request)
        self.num_watching += 1
        self._watched.set()
        try:
            with suppress(ConnectionError):
                while not self._is_closed:
                    changed = self._changed
                    lines = []
                    if epoch != self._epoch:
                        epoch, number = self._epoch, 0
                        lines.append(b"event: names\ndata: " + msgspec.json.encode(self._names))
                    if number < self._last:
                        samples = list(self._ring)[-(self._last - number) :]
                        number = self._last
                        lines.append(b"event: samples\ndata: [%b]" % b",".join(samples))
                    lines += [f"event: {name}\ndata: ".encode() + data for name, data in news()]
                    await write(response, b"\n\n".join([*lines, b""]), timeout_s=_WRITE_S)
                    await changed.wait()
                await write(response, b"event: end\ndata: {}\n\n", timeout_s=_WRITE_S)
                await response.write_eof()
        finally:
            self.num_watching -= 1
            if not self.num_watching:
                self._watched.clear()
        return response


async def _nothing() -> float:
    return REFRESH_S


_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def _file(name: str) -> bytes | None:
    listed = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    return listed[name].read_bytes() if name in listed else None


class PageRoutes:
    """The HTTP routes of the live page, which shows the metrics of a node or gateway in a browser.

    The routes need no authentication, because the files contain no data of the node.
    """

    @Route("GET", "/", Access.PUBLIC, content_type="text/html")
    async def page(self, request: web.BaseRequest) -> web.Response:
        """Return the HTML of the live page."""
        return await self._answer(request, "index.html")

    @Route("GET", "/live/{file}", Access.PUBLIC, content_type="text/javascript")
    async def file(self, request: web.BaseRequest) -> web.Response:
        """Return a file that the live page uses."""
        return await self._answer(request, in_path(request, "file"))

    async def _answer(self, request: web.BaseRequest, name: str) -> web.Response:
        body = await in_thread(_file, name)
        if body is None:
            raise web.HTTPNotFound
        kind = f"{_TYPES[Path(name).suffix]}; charset=utf-8"
        return web.Response(body=body, headers={**bodies.headers_of(request, kind), **_HEADERS})
