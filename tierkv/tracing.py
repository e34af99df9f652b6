"""OpenTelemetry spans of requests. While tracing is off, every function here does nothing.

    HTTP or engine  --traceparent-->  prefill node  --ticket-->  decode node
                                      |- match, fetch, queue     |- claim.wait, match, fetch, queue
                                      |- compute                 |- load
                                      `- publish                 `- storage.read, for each batch
                                          `- storage.write

A node or gateway traces if the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT, or
..._TRACES_ENDPOINT) and the extra `otel` is installed. OpenTelemetry's own variables set everything
else. In the process of an engine that has set up OpenTelemetry itself, `join` switches tracing on.
Single blocks have no spans.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tierkv.errors import how_to_install

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PARENT = "traceparent"
_LONGEST_PARENT = 128  # W3C's has 55 characters
_LAST_SPANS_S = 2.0  # time limit for sending the last spans at the end

Value = str | int | float | bool

_tracer: Any = None
_has_caller: contextvars.ContextVar[bool] = contextvars.ContextVar("has_caller", default=False)
_NOTHING: AbstractContextManager[Any] = nullcontext()


@contextmanager
def exporting(instance: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Send tracing spans to the configured collector until the `with` block ends.

    Nothing is traced if `environ` names no collector. If OpenTelemetry is not installed, nothing is
    traced either, and a warning is logged.

    Args:
        instance: name of this node or gateway.
        environ: environment variables; those of OpenTelemetry name the collector.
    """
    global _tracer  # noqa: PLW0603 - a process has one
    if not any(environ.get(name) for name in _ENDPOINTS):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        log.warning("traces are off although a collector is configured: %s", how_to_install("otel"))
        yield
        return
    names = {"service.instance.id": instance}
    if not environ.get("OTEL_SERVICE_NAME"):
        names["service.name"] = "tierkv"
    provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("tierkv")
    try:
        yield
    finally:
        _tracer = None
        last = threading.Thread(target=provider.shutdown, name="tierkv-last-spans", daemon=True)
        try:
            last.start()  # a thread, so that a missing collector does not delay the end
        except RuntimeError as error:
            log.warning("the last spans of the trace were lost: %s", error)
        else:
            last.join(_LAST_SPANS_S)


def join() -> None:
    """Send trace spans to the OpenTelemetry setup that this process already has.

    If the process has none, no spans are made.
    """
    global _tracer  # noqa: PLW0603 - a process has one
    if _tracer is None and "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace  # noqa: PLC0415 - it is loaded

        if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            _tracer = trace.get_tracer("tierkv")


def span(name: str, **about: Value) -> AbstractContextManager[Any]:
    """Return a context manager that records an OpenTelemetry span.

    Spans that begin inside it become children of this span.

    Args:
        name: name of the span, without the prefix "tierkv.".
        **about: attributes of the span.

    Returns:
        The context manager, which provides the span, or None if tracing is off.
    """
    if _tracer is None:
        return _NOTHING
    return _tracer.start_as_current_span(f"tierkv.{name}", attributes=about)  # type: ignore[no-any-return]


@contextmanager
def serving(name: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Trace the `with` block as a span: the handling of one HTTP request.

    If the request's headers name a span of its sender, the new span is a child of that span.

    Args:
        name: name of the new span.
        headers: headers of the request.

    Yields:
        The new span; None if tracing is off.
    """
    if _tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind  # noqa: PLC0415 - it is loaded

    parent = headers.get(_PARENT, "")
    token = _has_caller.set(bool(parent))
    try:
        with _tracer.start_as_current_span(
            name, context=_context_of(parent), kind=SpanKind.SERVER
        ) as one:
            yield one
    finally:
        _has_caller.reset(token)


def headers() -> dict[str, str]:
    """Return the HTTP headers that name the current span to a server; {} if there is no span."""
    parent = traceparent()
    return {_PARENT: parent} if parent else {}


def traceparent() -> str:
    """Return the current span as the value of a `traceparent` header; "" if there is no span."""
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - it is loaded
        TraceContextTextMapPropagator,
    )

    found: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(found)
    return found.get(_PARENT, "")


def adopt(parent: str) -> None:
    """Make this task's later spans children of the span in which the prompt was published.

    The current span, which has started already, gets a link to that span. If the HTTP request named
    its sender's span, nothing changes: the sender's trace contains the spans of both nodes.

    Args:
        parent: the `traceparent` value in the ticket; "" if the producer has no tracing.
    """
    if _tracer is None or not parent or _has_caller.get():
        return
    from opentelemetry import context as contexts  # noqa: PLC0415 - it is loaded
    from opentelemetry import trace  # noqa: PLC0415

    theirs = _context_of(parent)
    linked = trace.get_current_span(theirs).get_span_context()
    if linked.is_valid:
        trace.get_current_span().add_link(linked)
        contexts.attach(theirs)


def record(name: str, since_s: float, until_s: float | None = None, **about: Value) -> None:
    """Record a span of work that has already ended.

    Args:
        name: name of the span, without the prefix "tierkv.".
        since_s: start of the work, in seconds of `time.monotonic()`.
        until_s: end of the work on the same clock; None for now.
        **about: attributes of the span.
    """
    if _tracer is None:
        return
    ahead = time.time() - time.monotonic()
    until_s = time.monotonic() if until_s is None else until_s
    one = _tracer.start_span(
        f"tierkv.{name}", start_time=int((since_s + ahead) * 1e9), attributes=about
    )
    one.end(int((until_s + ahead) * 1e9))


def is_on() -> bool:
    return _tracer is not None


def context() -> contextvars.Context | None:
    """Return a context in which callbacks and threads can run.

    Spans that begin in the context become children of the current span.

    Returns:
        The context; None if tracing is off.
    """
    if _tracer is None:
        return None
    found = contextvars.copy_context()
    if traceparent():
        found.run(_has_caller.set, True)  # noqa: FBT003 - a variable's only argument
    return found


def _context_of(parent: str) -> Any:  # noqa: ANN401 - OpenTelemetry's
    from opentelemetry.context import Context  # noqa: PLC0415 - it is loaded
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    carrier = {_PARENT: parent} if len(parent) <= _LONGEST_PARENT else {}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())
