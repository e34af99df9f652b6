"""tierkv inside an engine's process: `Embedded` and `EngineCache`, and the types they use."""

from tierkv.cache.groups import NO_BLOCK, CacheGroup, GroupKind
from tierkv.embed.embedded import Embedded
from tierkv.embed.engine_cache import EngineCache
from tierkv.embed.exchange import AbortedError, Answer, Call, QueueFullError
from tierkv.embed.external import NodeHost
from tierkv.embed.host_side import EngineCacheSettings
from tierkv.embed.requests import Admitted, Until
from tierkv.embed.thread import CloseTimeoutError, EmbedSettings, ForkedError
from tierkv.errors import ServiceFailedError
from tierkv.ranks.worker_planes import Finished, RankSocket, WorkerPlanes

__all__ = [
    "NO_BLOCK",
    "AbortedError",
    "Admitted",
    "Answer",
    "CacheGroup",
    "Call",
    "CloseTimeoutError",
    "EmbedSettings",
    "Embedded",
    "EngineCache",
    "EngineCacheSettings",
    "Finished",
    "ForkedError",
    "GroupKind",
    "NodeHost",
    "QueueFullError",
    "RankSocket",
    "ServiceFailedError",
    "Until",
    "WorkerPlanes",
]
