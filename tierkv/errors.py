"""Every error tierkv raises, named for what the caller can do about it."""


class TierKVError(Exception):
    """The root of all errors raised by tierkv. Its text is one sentence a user can act on."""


class ConfigError(TierKVError):
    """A setting, option or file from the user is wrong: correct it and start again."""


class BadRequestError(TierKVError):
    """A request can never succeed as it stands: change it."""


class RequestTooLargeError(BadRequestError):
    """The request needs more blocks than the pool has in all: shorten it or enlarge the pool."""


class DuplicateRequestError(BadRequestError):
    """A request of this id is already running: use another id, or wait for that one."""


class RequestAbortedError(TierKVError):
    """The request was aborted: end it, its result is not wanted any more."""


class ShuttingDownError(TierKVError):
    """The service is draining and takes no new work: use another node."""


class ServiceFailedError(TierKVError):
    """The service stopped after an unexpected error, its cause: start another service."""


class OutOfBlocksError(TierKVError):
    """A pool cannot give what was asked for right now: wait, or shed load. Nothing was taken."""

    def __init__(self, tier: str, *, needed: int, available: int) -> None:
        super().__init__(f"{tier}: {needed} blocks needed, {available} available")
        self.tier = tier
        self.needed = needed
        self.available = available


class OverQuotaError(OutOfBlocksError):
    """A tenant's own quota is full: the request waits for other requests of the same tenant."""


class OwnershipError(TierKVError):
    """An id was released that its owner does not hold: a bug in the caller. Nothing changed."""


class LayoutError(TierKVError):
    """Shapes, sizes or alignments do not fit the layout: refuse the peer or the buffer."""


class TransferError(TierKVError):
    """A movement of bytes failed; the blocks concerned are named so that they can be recomputed."""

    def __init__(self, message: str, *, blocks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.blocks = blocks


class DeviceFailedError(TransferError):
    """The device itself is unusable: fail over to another node."""


class GateTimeoutError(TransferError):
    """A layer did not arrive in time: recompute, or wait again (the copy itself goes on)."""


class StoreError(TierKVError):
    """Something about the storage tier went wrong."""


class StoreUnavailableError(StoreError):
    """The store does not answer in time or refuses: skip the tier, compute instead."""


class StoreRefusedError(StoreUnavailableError):
    """The store answers, and refuses this, such as any change: go on with what it gives."""


class StoreDownError(StoreUnavailableError):
    """The store failed at once several times, so it is left alone: it is not slow, but gone."""


class StoreCorruptError(StoreError):
    """Bytes are not what was written: of a stored value (drop the key, compute instead), or of a
    message of another process of ours."""


class HandoffError(TierKVError):
    """A claim cannot be served; `reason` names the case."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvariantError(TierKVError):
    """`verify()` found the books not in order; `findings` says what, in words."""

    def __init__(self, findings: tuple[str, ...]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def how_to_install(extra: str) -> str:
    """The command that adds `extra` of pyproject.toml, for error sentences.

    It works from a checkout: the package index has another project under the name tierkv.
    """
    return f"pip install -e '.[{extra}]' in the checkout of tierkv"
