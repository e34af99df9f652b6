"""Finds stop strings in text that comes in pieces, and holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Feed it text in pieces, cut anywhere; the result does not depend on where.

    stops: texts that end the answer and are not part of it; none may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "checked where they came in"
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """What can be shown now: nothing after the first stop string that is complete."""
        if self.has_stopped:
            return ""
        if not self._stops:
            return text
        shown = []
        for character in text:
            self._held += character
            found = max(
                (stop for stop in self._stops if self._held.endswith(stop)), key=len, default=""
            )
            if found:
                self.has_stopped = True
                shown.append(self._held.removesuffix(found))
                self._held = ""
                break
            keep = self._longest_start()
            shown.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return "".join(shown)

    def rest(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
