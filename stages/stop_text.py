"""Find stop strings in text that arrives in pieces, and let nothing of them out."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class StopText:
    """Releases text as soon as it cannot become part of a stop string.

    The match that is complete first ends the text; of those complete at the same character, the
    longest. So the answer is the same however the text is cut into pieces, and what was released
    never holds a stop string, nor the beginning of the one that matched.
    """

    def __init__(self, stops: Seq[str]):
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string that is complete)."""
        text = self._held + piece
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            end, at = min(found)
            return text[:at], text[at:end]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest tail that is a proper prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
