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
class Call(Generic[A]):
    """path: with {id} where one goes. answer: what comes back; `bytes` is the body as it is."""

    method: str
    path: str
    answer: type[A]
    repeat: Repeat = Repeat.ALWAYS


# Probes and books
LIVEZ = Call("GET", "/livez", types.LiveAnswer)
READYZ = Call("GET", "/readyz", types.ReadyAnswer)
HEALTHZ = Call("GET", "/healthz", types.ReadyAnswer)
VERSION = Call("GET", "/version", types.VersionAnswer)
METRICS = Call("GET", "/metrics", bytes)
STATS = Call("GET", "/v1/stats", Stats)
VERIFY = Call("GET", "/v1/verify", types.VerifyAnswer)
OPENAPI = Call("GET", "/openapi.json", bytes)

# The reference model; named by the client like requests, so that a node does the work once
GENERATE = Call("POST", "/v1/generate", types.GenerateAnswer)
PREFILL = Call("POST", "/v1/prefill", types.PrefillAnswer)
DECODE = Call("POST", "/v1/decode", types.DecodeAnswer)
LOOKUP = Call("POST", "/v1/lookup", types.LookupAnswer)
EXPLAIN = Call("POST", "/v1/explain", Explanation)

# Requests of engines; those that begin one are named by the client, and a node does them once
ADMIT = Call("POST", "/v1/requests", types.RequestAnswer)
REQUEST = Call("GET", "/v1/requests/{id}", types.RequestAnswer)
ABORT = Call("DELETE", "/v1/requests/{id}", types.EndAnswer)
EXPLAIN_REQUEST = Call("GET", "/v1/requests/{id}/explain", Explanation)
COMMIT = Call("POST", "/v1/requests/{id}/commit", types.RequestAnswer)
EXTEND = Call("POST", "/v1/requests/{id}/extend", types.RequestAnswer)
PREEMPT = Call("POST", "/v1/requests/{id}/preempt", types.RequestAnswer, Repeat.NEVER)
RESUME = Call("POST", "/v1/requests/{id}/resume", types.RequestAnswer, Repeat.NEVER)
FINISH = Call("POST", "/v1/requests/{id}/finish", types.EndAnswer)
PUBLISH = Call("POST", "/v1/requests/{id}/publish", types.PublishAnswer)
STREAM = Call("POST", "/v1/requests/{id}/stream", types.StreamAnswer)
CLAIM = Call("POST", "/v1/claims", types.ClaimAnswer)

# The cache
PREFETCH = Call("POST", "/v1/prefetches", types.PrefetchAnswer)
PREFETCH_STATE = Call("GET", "/v1/prefetches/{id}", types.PrefetchAnswer)
BACKUP = Call("POST", "/v1/backups", types.BackupAnswer)
BACKUP_STATE = Call("GET", "/v1/backups/{id}", types.BackupAnswer)
CANCEL_BACKUP = Call("DELETE", "/v1/backups/{id}", types.BackupAnswer)
CANCEL_PREFETCH = Call("DELETE", "/v1/prefetches/{id}", types.PrefetchAnswer)
PINS = Call("GET", "/v1/pins", types.PinsAnswer)
PIN = Call("PUT", "/v1/pins/{id}", types.PinAnswer)
PIN_STATE = Call("GET", "/v1/pins/{id}", types.PinAnswer)
UNPIN = Call("DELETE", "/v1/pins/{id}", types.PinAnswer)

TICKET = Call("GET", "/v1/tickets/{id}", types.TicketAnswer)
FORGET_TICKET = Call("DELETE", "/v1/tickets/{id}", types.TicketAnswer)
ACKNOWLEDGE = Call("POST", "/v1/tickets/{id}/ack", types.TicketAnswer)

# The node as a whole
DRAIN = Call("POST", "/v1/drain", types.LifeAnswer)
PAUSE = Call("POST", "/v1/pause", types.LifeAnswer)
UNPAUSE = Call("POST", "/v1/resume", types.LifeAnswer)
SLEEP = Call("POST", "/v1/sleep", types.LifeAnswer)
WAKE = Call("POST", "/v1/wake", types.LifeAnswer)
RESIZE = Call("POST", "/v1/resize", types.TiersAnswer)
RESET = Call("POST", "/v1/reset", types.ResetAnswer)
FORGET_BLOCKS = Call("DELETE", "/v1/blocks", types.ResetAnswer)
BLOCKS = Call("GET", "/v1/blocks", types.BlocksAnswer)
CONFIG = Call("GET", "/v1/config", types.ConfigAnswer)
TIERS = Call("GET", "/v1/tiers", types.TiersAnswer)
ATTACH_STORAGE = Call("PUT", "/v1/tiers/storage", types.TiersAnswer)
DETACH_STORAGE = Call("DELETE", "/v1/tiers/storage", types.TiersAnswer)
SET_QUOTA = Call("PUT", "/v1/quotas/{id}", types.QuotaAnswer)
QUOTA = Call("GET", "/v1/quotas/{id}", types.QuotaAnswer)
DROP_QUOTA = Call("DELETE", "/v1/quotas/{id}", types.QuotaAnswer)
EVENTS = Call("GET", "/v1/events", bytes)
