"""Which server is the master just now, asked of the sentinels before each new connection."""

from __future__ import annotations

from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis.control import ask_once, connection_factory
from tierkv.storage.redis.node import RedisAccess
from tierkv.storage.redis.pool import Login
from tierkv.storage.redis.socket import Address, port_of
from tierkv.storage.redis.url import RedisUrl

_ADDRESS_PARTS = 2


class SentinelLocator:
    """The first sentinel that answers is believed, and asked first the next time.

    After a failover the old master closes its clients' connections, or is dead; a connection that
    still leads to a replica is refused its first write and closed.
    """

    def __init__(self, url: RedisUrl, access: RedisAccess) -> None:
        self._url = url
        self._access = access
        self._sentinels = list(url.addresses)

    async def locate(self) -> Address:
        failures = []
        for sentinel in tuple(self._sentinels):
            try:
                address = await self._ask(sentinel)
            except StoreUnavailableError as error:
                failures.append(str(error))
                continue
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            return address
        raise StoreUnavailableError(f"no sentinel of {self._url} helps: {'; '.join(failures)}")

    async def _ask(self, sentinel: Address) -> Address:
        settings = self._access.settings
        deadline_s = settings.timeout_s / len(self._sentinels)
        login = Login(settings.sentinel_username, settings.sentinel_password)
        connection = connection_factory(
            sentinel, login, self._access.tls_files, connect_timeout_s=deadline_s
        )
        reply = await ask_once(
            connection,
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.service),
            url=f"the sentinel at {sentinel}",
            deadline_s=deadline_s,
        )
        if not isinstance(reply, list) or len(reply) != _ADDRESS_PARTS:
            raise StoreUnavailableError(
                f"the sentinel at {sentinel} knows no service {self._url.service!r}: correct it "
                "in the URL, to the name in the sentinel's `monitor` line"
            )
        match reply:
            case [bytes(host), bytes(port_text)]:
                port = port_of(port_text.decode("utf-8", "replace"))
                if port is not None:
                    return Address(host.decode("utf-8", "replace"), port)
        raise StoreUnavailableError(f"the sentinel at {sentinel} answers {reply!r:.80}")
