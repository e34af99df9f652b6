"""Every route that the client calls. A method of the client is its name here in small letters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from tierkv.api import types
from tierkv.observe import Stats
from tierkv.sched.explain import Explanation

A = TypeVar("A")


class Repeat(Enum):
    """Whether a call may be made again when its answer was lost."""

    ALWAYS = "always"  # it changes nothing, or the second time nothing more
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class RouteCall(Generic[A]):
    """path: with {id} where one goes. answer: what comes back; `bytes` is the body as it is."""

    method: str
    path: str
    answer: type[A]
    repeat: Repeat = Repeat.ALWAYS


# Probes and books
LIVEZ = RouteCall("GET", "/livez", types.LiveAnswer)
READYZ = RouteCall("GET", "/readyz", types.ReadyAnswer)
HEALTHZ = RouteCall("GET", "/healthz", types.ReadyAnswer)
VERSION = RouteCall("GET", "/version", types.VersionAnswer)
METRICS = RouteCall("GET", "/metrics", bytes)
STATS = RouteCall("GET", "/v1/stats", Stats)
VERIFY = RouteCall("GET", "/v1/verify", types.VerifyAnswer)
OPENAPI = RouteCall("GET", "/openapi.json", bytes)

# The reference model; named by the client like requests, so that a node does the work once
GENERATE = RouteCall("POST", "/v1/generate", types.GenerateAnswer)
PREFILL = RouteCall("POST", "/v1/prefill", types.PrefillAnswer)
DECODE = RouteCall("POST", "/v1/decode", types.DecodeAnswer)
LOOKUP = RouteCall("POST", "/v1/lookup", types.LookupAnswer)
EXPLAIN = RouteCall("POST", "/v1/explain", Explanation)

# Requests of engines; those that begin one are named by the client, and a node does them once
ADMIT = RouteCall("POST", "/v1/requests", types.RequestAnswer)
REQUEST = RouteCall("GET", "/v1/requests/{id}", types.RequestAnswer)
ABORT = RouteCall("DELETE", "/v1/requests/{id}", types.EndAnswer)
EXPLAIN_REQUEST = RouteCall("GET", "/v1/requests/{id}/explain", Explanation)
COMMIT = RouteCall("POST", "/v1/requests/{id}/commit", types.RequestAnswer)
EXTEND = RouteCall("POST", "/v1/requests/{id}/extend", types.RequestAnswer)
PREEMPT = RouteCall("POST", "/v1/requests/{id}/preempt", types.RequestAnswer, Repeat.NEVER)
RESUME = RouteCall("POST", "/v1/requests/{id}/resume", types.RequestAnswer, Repeat.NEVER)
FINISH = RouteCall("POST", "/v1/requests/{id}/finish", types.EndAnswer)
PUBLISH = RouteCall("POST", "/v1/requests/{id}/publish", types.PublishAnswer)
STREAM = RouteCall("POST", "/v1/requests/{id}/stream", types.StreamAnswer)
CLAIM = RouteCall("POST", "/v1/claims", types.ClaimAnswer)

# The cache
PREFETCH = RouteCall("POST", "/v1/prefetches", types.PrefetchAnswer)
PREFETCH_STATE = RouteCall("GET", "/v1/prefetches/{id}", types.PrefetchAnswer)
BACKUP = RouteCall("POST", "/v1/backups", types.BackupAnswer)
BACKUP_STATE = RouteCall("GET", "/v1/backups/{id}", types.BackupAnswer)
CANCEL_BACKUP = RouteCall("DELETE", "/v1/backups/{id}", types.BackupAnswer)
CANCEL_PREFETCH = RouteCall("DELETE", "/v1/prefetches/{id}", types.PrefetchAnswer)
PINS = RouteCall("GET", "/v1/pins", types.PinsAnswer)
PIN = RouteCall("PUT", "/v1/pins/{id}", types.PinAnswer)
PIN_STATE = RouteCall("GET", "/v1/pins/{id}", types.PinAnswer)
UNPIN = RouteCall("DELETE", "/v1/pins/{id}", types.PinAnswer)

TICKET = RouteCall("GET", "/v1/tickets/{id}", types.TicketAnswer)
FORGET_TICKET = RouteCall("DELETE", "/v1/tickets/{id}", types.TicketAnswer)
ACKNOWLEDGE = RouteCall("POST", "/v1/tickets/{id}/ack", types.TicketAnswer)

# The node as a whole
DRAIN = RouteCall("POST", "/v1/drain", types.LifeAnswer)
PAUSE = RouteCall("POST", "/v1/pause", types.LifeAnswer)
UNPAUSE = RouteCall("POST", "/v1/resume", types.LifeAnswer)
SLEEP = RouteCall("POST", "/v1/sleep", types.LifeAnswer)
WAKE = RouteCall("POST", "/v1/wake", types.LifeAnswer)
RESIZE = RouteCall("POST", "/v1/resize", types.TiersAnswer)
RESET = RouteCall("POST", "/v1/reset", types.ResetAnswer)
FORGET_BLOCKS = RouteCall("DELETE", "/v1/blocks", types.ResetAnswer)
BLOCKS = RouteCall("GET", "/v1/blocks", types.BlocksAnswer)
CONFIG = RouteCall("GET", "/v1/config", types.ConfigAnswer)
TIERS = RouteCall("GET", "/v1/tiers", types.TiersAnswer)
ATTACH_STORAGE = RouteCall("PUT", "/v1/tiers/storage", types.TiersAnswer)
DETACH_STORAGE = RouteCall("DELETE", "/v1/tiers/storage", types.TiersAnswer)
SET_QUOTA = RouteCall("PUT", "/v1/quotas/{id}", types.QuotaAnswer)
QUOTA = RouteCall("GET", "/v1/quotas/{id}", types.QuotaAnswer)
DROP_QUOTA = RouteCall("DELETE", "/v1/quotas/{id}", types.QuotaAnswer)
EVENTS = RouteCall("GET", "/v1/events", bytes)
