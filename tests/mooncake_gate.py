"""Before a Mooncake master: freezes for its clients when a name is named the third time.

Run as a program, `mooncake_gate.py master-port name`: the client's calls keep the interpreter, so
that no thread of the same process could pass anything on. It prints its port, "holding" when it
lets nothing through any more, either way, and goes on at a line from its input.
"""

from __future__ import annotations

import asyncio
import sys

_HOLDS_AT = 3


async def main(master_port: int, name: bytes) -> None:
    may_pass = asyncio.Event()
    may_pass.set()
    num_named = 0

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_asking: bool
    ) -> None:
        nonlocal num_named
        while piece := await reader.read(1 << 16):
            if is_asking and num_named < _HOLDS_AT:
                num_named += piece.count(name)
                if num_named >= _HOLDS_AT:
                    may_pass.clear()
                    print("holding", flush=True)  # noqa: T201
            await may_pass.wait()
            writer.write(piece)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_master, to_master = await asyncio.open_connection("127.0.0.1", master_port)
        async with asyncio.TaskGroup() as group:
            group.create_task(copy(reader, to_master, is_asking=True))
            group.create_task(copy(from_master, writer, is_asking=False))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await asyncio.to_thread(sys.stdin.readline)
    may_pass.set()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2].encode()))
