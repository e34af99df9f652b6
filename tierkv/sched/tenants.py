"""Open and close the fingerprints that a service has besides its own: other tenants, adapters.

The quotas of tenants are set here, too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from tierkv.cache.eviction import EvictionKinds
from tierkv.cache.keys import Fingerprint
from tierkv.cache.node import DEFAULT, Quota, Space, Tier, TreeNode, check_quota
from tierkv.errors import BadRequestError, ConfigError, OutOfBlocksError
from tierkv.sched.lifecycle import forgetting
from tierkv.sched.tiers import Tiers

_AT_ONCE = 128  # largest number of copies of blocks that are removed in one turn of the loop
MAX_ADAPTERS = 64  # adapters of one tenant that are open at a time


class Tenants:
    """The fingerprints for which a node accepts requests, each with its own space in the index.

    A space is opened by `open`, or by the first request of its tenant and adapter. Unused spaces
    are closed to make room for others.

    Args:
        tiers: the tiers of the node.
        fingerprints: the fingerprints with an open space, by name of the space; the service's own
            has the name "". Opening and closing a space changes this dictionary.
        is_in_use: returns True if requests of the space with this name run, wait, or have blocks
            fetched for them.
        on_close: called with the name of each space that was closed.
        max_tenants: largest number of spaces that requests have opened and that are open at once.
        quota: largest numbers of device and host blocks of a tenant for which no other quota is
            set.
        eviction: eviction policies of new spaces.

    Attributes:
        closed: names of closed spaces whose blocks may still be in storage.
    """

    def __init__(  # noqa: PLR0913 - collaborators and settings
        self,
        tiers: Tiers,
        fingerprints: dict[str, Fingerprint],
        is_in_use: Callable[[str], bool],
        *,
        on_close: Callable[[str], None],
        max_tenants: int,
        quota: Quota,
        eviction: EvictionKinds,
    ) -> None:
        self._on_close = on_close
        self._tiers = tiers
        self._index = tiers.index
        self._fingerprints = fingerprints
        self._is_in_use = is_in_use
        self._max_tenants = max_tenants
        self._quota = quota
        self._set_quotas: dict[str, Quota] = {}  # by name of the space, also of closed ones
        self._eviction = eviction
        # Spaces by tenant and adapter, the most recently used last.
        self._by_tenant: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._closing: set[str] = set()  # spaces that a task is closing to make room for others
        self.closed: set[str] = set()  # spaces with blocks that may still be in storage

    def known_space_of(self, tenant: str) -> str | None:
        """Return the name of a tenant's space (part of the index) for prompts without an adapter.

        The call never opens a space.

        Returns:
            The name, if the space is open or a quota was set for it; None otherwise.
        """
        own = self._fingerprints[DEFAULT]
        if tenant == own.tenant:
            return DEFAULT
        short = replace(own, tenant=tenant).short
        return short if short in self._fingerprints or short in self._set_quotas else None

    def space_of(self, tenant: str, adapter: str = "") -> str:
        """Return the name of the space of a tenant and an adapter; open the space if necessary.

        A new space has the quota that is set for its tenant. If too many spaces are open, the least
        recently used space without requests is closed, and its blocks are removed from device and
        host. For a space with many blocks, a task removes the blocks; if a request uses the space
        before the task has ended, the space stays open.

        Args:
            tenant: name of the tenant.
            adapter: name of the adapter, "" for none.

        Returns:
            The name of the space; "" for the service's own.

        Raises:
            OutOfBlocksError: too many spaces are open, and all of them are in use.
        """
        own = self._fingerprints[DEFAULT]
        if tenant == own.tenant and adapter in {"", own.adapter}:
            return DEFAULT
        key = tenant, adapter
        known = self._by_tenant.get(key)
        if known is not None:
            self._by_tenant.move_to_end(key)
            self._closing.discard(known)
            return known
        plain = replace(own, tenant=tenant)
        fingerprint = replace(plain, adapter=adapter) if adapter else plain
        if fingerprint.short not in self._fingerprints:
            self._make_room(key)
            self._open(fingerprint, self._set_quotas.get(plain.short, self._quota))
        self._by_tenant[key] = fingerprint.short
        return fingerprint.short

    def _make_room(self, wanted: tuple[str, str]) -> None:
        """Close an unused space if there are too many spaces to open one for `wanted`.

        `wanted` is a pair of tenant and adapter. If no space can be closed, OutOfBlocksError is
        raised.
        """
        tenant, adapter = wanted
        candidates = [one for one in self._by_tenant if adapter and one[1] and one[0] == tenant]
        if len(candidates) < MAX_ADAPTERS:
            if len(self._by_tenant) - len(self._closing) < self._max_tenants:
                return
            candidates = list(self._by_tenant)
        for space in map(self._by_tenant.__getitem__, candidates):
            if space in self._closing or self._why_not_to_close(space):
                continue
            if sum(self._index.spaces.root_named(space).space.used) <= _AT_ONCE:
                self._close(space)
            else:
                self._closing.add(space)
                self._tiers.work.start(self._close_on(space), "tierkv-close", space=space)
            return
        raise OutOfBlocksError("tenants", needed=1, available=0)

    async def _close_on(self, space: str) -> None:
        if space not in self._closing:
            return
        for _ in forgetting(self._tiers, [self._index.spaces.root_named(space)]):
            await asyncio.sleep(0)
            if space not in self._closing:
                return
        self._closing.remove(space)
        if not self._why_not_to_close(space):
            self._close(space)

    def open(self, fingerprint: Fingerprint, quota: Quota) -> str:
        """Open a space for `fingerprint`, in addition to the service's own space.

        A space is the part of the index for one fingerprint.

        Args:
            fingerprint: the fingerprint of the blocks in the space.
            quota: largest numbers of device and host blocks in the space; a number is None for no
                limit. If the space is closed automatically because it is unused, the quota applies
                again when the space is opened again.

        Returns:
            The name of the space.

        Raises:
            ConfigError: the fingerprint has another layout than the service's, or is the service's
                own.
            BadRequestError: the fingerprint has an open space already.
        """
        name = self._open(fingerprint, quota)
        self._set_quotas[name] = quota
        return name

    def _open(self, fingerprint: Fingerprint, quota: Quota) -> str:
        own = self._fingerprints[DEFAULT]
        if fingerprint.layout.digest != own.layout.digest or fingerprint.short == own.short:
            raise ConfigError(
                "a further fingerprint must have the service's layout, and differ from "
                "the service's fingerprint in another field"
            )
        space = Space(fingerprint.short, fingerprint.root(), quota=quota)
        self._index.spaces.open(space, self._eviction)
        self.closed.discard(space.name)
        self._fingerprints[space.name] = fingerprint
        return space.name

    def close(self, name: str) -> int:
        """Close a space: forget its quota, and remove all of its blocks from device and host.

        Stored values stay. The call blocks the event loop until all blocks are removed. `retire`
        removes them in short steps instead.

        Returns:
            The number of removed copies of blocks.

        Raises:
            BadRequestError: the space is in use or not open; nothing has changed.
        """
        self._check_unused(name)
        self._set_quotas.pop(name, None)
        return self._close(name)

    async def retire(self, name: str) -> int:
        """Close a space: remove its quota, and all of its blocks from device and host.

        Stored values stay. Other tasks of the event loop run during the call; `close` does the same
        without a pause.

        Returns:
            The number of removed copies of blocks.

        Raises:
            BadRequestError: the space is not open or is in use. If a request begins to use it
                during the call, it stays open, without the blocks that were removed until then.
        """
        root = self._check_unused(name)
        before = sum(root.space.used)
        for _ in forgetting(self._tiers, [root, *self._index.spaces.retired(name)]):
            await asyncio.sleep(0)
            if self._check_unused(name).space is not root.space:
                raise BadRequestError(
                    f"fingerprint {name!r} was closed and opened again by another call "
                    "during this one"
                )
        self.close(name)
        return before

    def _check_unused(self, name: str) -> TreeNode:
        if name == DEFAULT or name not in self._fingerprints:
            raise BadRequestError(
                f"fingerprint {name!r} cannot be closed: it is not open, or is the service's own"
            )
        if why := self._why_not_to_close(name):
            raise BadRequestError(
                f"fingerprint {name!r} cannot be closed, since it is in use: {why}"
            )
        return self._index.spaces.root_named(name)

    def _why_not_to_close(self, name: str) -> str:
        root = self._index.spaces.root_named(name)
        if self._is_in_use(name):
            return "its requests have not ended"
        if root.holders or any(one.holders for one in self._index.spaces.retired(name)):
            return "pins or running copies hold some of its blocks"
        return ""

    def _close(self, name: str) -> int:
        root = self._index.spaces.root_named(name)
        before = sum(root.space.used)
        for one in (root, *self._index.spaces.retired(name)):
            for node in list(one.children.values()):
                self._tiers.eviction.forget(node, 0)
        self._index.spaces.close(name)
        del self._fingerprints[name]
        self.closed.add(name)
        self._on_close(name)
        self._closing.discard(name)
        for key in [one for one, space in self._by_tenant.items() if space == name]:
            del self._by_tenant[key]
        self._tiers.work.capacity_changed()
        return before

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; [] if there are none."""
        wrong, open_spaces = [], {space.name for space in self._index.spaces.all()}
        if open_spaces != self._fingerprints.keys():
            wrong.append("the open fingerprints differ from the fingerprints of the index")
        by_name = set(self._by_tenant.values())
        if not self._closing <= by_name <= open_spaces:
            wrong.append("a tenant is listed without a fingerprint")
        if not open_spaces - {DEFAULT} <= by_name | self._set_quotas.keys():
            wrong.append("a fingerprint is listed that was never opened")
        return wrong

    def quota_of(self, name: str) -> Quota:
        """Return the largest numbers of device and host blocks of a space; None for no limit.

        The call also works for a closed space for which a quota was set.
        """
        kept = self._set_quotas.get(name)
        return self._index.spaces.root_named(name).space.quota if kept is None else kept

    def set_quota(self, name: str, quota: Quota) -> None:
        """Set the largest numbers of device and host blocks of a space.

        Unused blocks beyond the quota are evicted, in a task if they are many. Blocks in use are
        evicted later, when the space needs room. The quota stays set if the space is closed to make
        room for another tenant and opened again.

        Args:
            name: name of the space.
            quota: largest numbers of device and host blocks; None for no limit.
        """
        check_quota(quota)
        if name in self._set_quotas and name not in self._fingerprints:
            self._set_quotas[name] = quota
            return
        root = self._index.spaces.root_named(name)
        self._set_quotas[name] = quota
        self._index.spaces.set_quota(root.space, quota, self._eviction)
        if self._shrink(root.space):
            self._tiers.work.start(self._shrink_on(root.space), "tierkv-quota", space=name)
        self._tiers.work.capacity_changed()

    def _shrink(self, space: Space) -> bool:
        have_more = [self._tiers.eviction.shrink_to_quota(tier, space) for tier in Tier]
        return any(have_more)

    async def _shrink_on(self, space: Space) -> None:
        is_over = False
        while not is_over:
            await asyncio.sleep(0)
            is_over = not self._shrink(space)
            self._tiers.work.capacity_changed()
