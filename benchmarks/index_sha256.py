"""What one chained SHA-256 digest of a block costs, which the index's figures are compared with.

With the CPU's SHA instructions a digest takes two thirds (16 tokens) to half (64) of what it takes
without, so ratios to it are harder to meet where they are there. `without_instructions` measures
the same calls with OpenSSL told not to use them, which only a new process can be.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import subprocess
import sys
import time

_NUM_BLOCKS = 50_000
# OpenSSL's mask of CPU features, second word, bit 29: the SHA extensions.
_NO_SHA = {"OPENSSL_ia32cap": ":~0x20000000"}


def seconds_per_digest(packed: bytes, block_size: int) -> float:
    """Of `hashlib.sha256(previous digest + block)` over consecutive blocks: CPU time."""
    width = block_size * 4
    digest = bytes(32)
    started = time.thread_time()
    for at in range(0, len(packed), width):
        digest = hashlib.sha256(digest + packed[at : at + width]).digest()
    return (time.thread_time() - started) / (len(packed) // width)


def without_instructions(block_size: int) -> float | None:
    """The same in a process of its own without SHA instructions; None where they cannot be
    switched off, on any CPU but x86-64."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return None
    command = [sys.executable, "-m", "benchmarks.index_sha256", str(block_size)]
    ran = subprocess.run(
        command, env=os.environ | _NO_SHA, stdout=subprocess.PIPE, check=True, timeout=120
    )
    return float(ran.stdout)


if __name__ == "__main__":
    size = int(sys.argv[1])
    print(seconds_per_digest(random.Random(size).randbytes(_NUM_BLOCKS * size * 4), size))
