"""Where a node's log goes: standard error."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
