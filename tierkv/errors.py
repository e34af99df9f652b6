"""All errors that tierkv raises. Each class is named for what the caller can do about the error."""


class TierKVError(Exception):
    """Base class of all errors that tierkv raises. The text says what is wrong and what to do."""


class ConfigError(TierKVError):
    """A setting, an option or a file is wrong: correct it and start again."""


class BadRequestError(TierKVError):
    """The request is wrong: correct it. A retry of the same request fails again."""


class RequestTooLargeError(BadRequestError):
    """The request exceeds a limit of tokens, blocks or bytes: shorten it, or raise the limit."""


class DuplicateRequestError(BadRequestError):
    """Another request or prompt uses this id: use another id, or wait until that one has ended."""


class RequestAbortedError(TierKVError):
    """Another call aborted the request, because its result is not wanted: do not retry it."""


class ShuttingDownError(TierKVError):
    """The node or service is shutting down: use another node, or wait for its restart."""


class ServiceFailedError(TierKVError):
    """The service stopped after an unexpected error: read its log, and start another service."""


class OutOfBlocksError(TierKVError):
    """A tier has too few free blocks now: wait, or shed load. No block was allocated.

    Attributes:
        tier: name of the tier.
        needed: number of blocks that the call needs.
        available: number of blocks that could be allocated.
    """

    def __init__(self, tier: str, *, needed: int, available: int) -> None:
        super().__init__(f"{tier}: {needed} blocks needed, {available} available")
        self.tier = tier
        self.needed = needed
        self.available = available


class OverQuotaError(OutOfBlocksError):
    """A tenant's quota is used up: wait until another request of the same tenant has ended."""


class OwnershipError(TierKVError):
    """The state of a request, lease or device forbids this call: correct the code that calls.

    The call changed nothing.
    """


class LayoutError(TierKVError):
    """Shapes, sizes or alignments differ from what the layout of the blocks requires."""


class TransferError(TierKVError):
    """A copy of blocks has failed. The tokens of the blocks in `blocks` must be computed again.

    Attributes:
        blocks: ids of device blocks with invalid content; empty if they are unknown.
    """

    def __init__(self, message: str, *, blocks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.blocks = blocks


class DeviceFailedError(TransferError):
    """The device is unusable: use another node, and restart this one."""


class GateTimeoutError(TransferError):
    """Blocks were not on the device in time: compute their tokens, or wait for the copy again."""


class StoreError(TierKVError):
    """The storage tier failed: check the store that the error's text names."""


class StoreUnavailableError(StoreError):
    """The store refuses a call or gives no answer in time: compute the prompt, check the store."""


class StoreRefusedError(StoreUnavailableError):
    """The store answers, but refuses this operation, such as a write: continue with reads."""


class StoreDownError(StoreUnavailableError):
    """The store failed repeatedly, and is unused until a probe is answered: compute the prompt."""


class StoreCorruptError(StoreError):
    """A stored value or a received message is damaged.

    Delete the stored value and compute its tokens.
    """


class HandoffError(TierKVError):
    """A prompt could not be published or claimed: act on the reason, or compute the prompt.

    Attributes:
        reason: the value of a member of `pd.tickets.HandoffProblem`, such as "expired".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvariantError(TierKVError):
    """`verify()` found inconsistent blocks or leases, a bug in tierkv: report the findings.

    Attributes:
        findings: one sentence per violated invariant.
    """

    def __init__(self, findings: tuple[str, ...]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def how_to_install(extra: str) -> str:
    """Return the command that installs optional packages of tierkv, for error sentences.

    The command works in a checkout only: on PyPI, the name tierkv belongs to another project.

    Args:
        extra: name of the group of optional packages in pyproject.toml.
    """
    return f"pip install -e '.[{extra}]' in the checkout of tierkv"
