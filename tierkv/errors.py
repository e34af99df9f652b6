"""All errors that tierkv raises, named for what the caller can do about them."""


class TierKVError(Exception):
    """The root of all errors raised by tierkv. Its text is a sentence that names the remedy."""


class ConfigError(TierKVError):
    """A setting, an option or a file is wrong: correct it and start again."""


class BadRequestError(TierKVError):
    """The request is wrong: correct it, since a retry of the same request fails again."""


class RequestTooLargeError(BadRequestError):
    """The request needs more tokens, blocks or bytes than a limit: shorten it, or raise that."""


class DuplicateRequestError(BadRequestError):
    """The id is in use for another request or prompt: use another id, or wait for its end."""


class RequestAbortedError(TierKVError):
    """Another call aborted the request: do not repeat it, since its result is not wanted."""


class ShuttingDownError(TierKVError):
    """The node or service is shutting down: use another node, or wait for its restart."""


class ServiceFailedError(TierKVError):
    """The service stopped after an unexpected error, which is its cause: start another service."""


class OutOfBlocksError(TierKVError):
    """A tier has too few free blocks now: wait, or shed load. No block was taken."""

    def __init__(self, tier: str, *, needed: int, available: int) -> None:
        super().__init__(f"{tier}: {needed} blocks needed, {available} available")
        self.tier = tier
        self.needed = needed
        self.available = available


class OverQuotaError(OutOfBlocksError):
    """A tenant's quota is full: wait for the end of another request of the same tenant."""


class OwnershipError(TierKVError):
    """A call does not fit the state of its request, lease or device: a bug in the caller.

    Nothing changed.
    """


class LayoutError(TierKVError):
    """Shapes, sizes or alignments do not fit the layout: correct the layout, or refuse the peer."""


class TransferError(TierKVError):
    """A copy of blocks failed: compute the blocks that the error names.

    Attributes:
        blocks: device block ids whose content is not valid; empty if unknown.
    """

    def __init__(self, message: str, *, blocks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.blocks = blocks


class DeviceFailedError(TransferError):
    """The device is unusable: use another node, and restart this one."""


class GateTimeoutError(TransferError):
    """Blocks were not on the device in time: compute them, or wait again for the copy."""


class StoreError(TierKVError):
    """The storage tier failed: check the store that the error's text names."""


class StoreUnavailableError(StoreError):
    """The store refuses or does not answer in time: compute instead, and check the store."""


class StoreRefusedError(StoreUnavailableError):
    """The store answers and refuses this operation, such as a write: continue with reads."""


class StoreDownError(StoreUnavailableError):
    """The store failed repeatedly and is not asked until it answers a probe: compute instead."""


class StoreCorruptError(StoreError):
    """A stored value or a message differs from what was written: drop it, and compute instead."""


class HandoffError(TierKVError):
    """A prompt cannot be handed over: see the reason.

    Attributes:
        reason: a value of HandoffProblem.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvariantError(TierKVError):
    """`verify()` found inconsistent blocks or leases: a bug in tierkv, so report the findings.

    Attributes:
        findings: one sentence per violated invariant.
    """

    def __init__(self, findings: tuple[str, ...]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def how_to_install(extra: str) -> str:
    """Return the command that installs the extra `extra` of pyproject.toml, for error sentences.

    The command works in a checkout: the package index has another project with the name tierkv.
    """
    return f"pip install -e '.[{extra}]' in the checkout of tierkv"
