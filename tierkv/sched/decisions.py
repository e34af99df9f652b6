"""What was decided for blocks that a request lacks on the device, counted by decision and tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Decisions:
    """Counts since the start, one for each run of blocks that was decided on.

    load_host: brought to the device from the host. fetch_storage: brought from storage.
    wait_device: waited for, while another request computes them. wait_storage: waited for, while
    another request's fetch brings them. recompute_device: computed, although another request was
    at it. recompute_storage: computed, although storage had them, or was not even asked, since
    that was estimated to be slower. recompute_late: computed, since storage was too slow.
    """

    load_host: int = 0
    fetch_storage: int = 0
    wait_device: int = 0
    wait_storage: int = 0
    recompute_device: int = 0
    recompute_storage: int = 0
    recompute_late: int = 0
