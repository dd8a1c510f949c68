"""Leases of an engine in another process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from pipeline.errors import ClosedError


class FarLeases:
    """They end with that process: the next one knows nothing of them. That process does not hear of a drain, so
    it is here that leases are over then (`lent`)."""

    def __init__(self, ask: Callable[..., Any], lent: Callable[[], bool]):
        self._ask, self._lent = ask, lent

    def take(self, name: str) -> None:
        self._ask("take_lease", name=name)

    def state(self, name: str) -> str:
        with contextlib.suppress(ClosedError):
            if self._lent():
                return str(self._ask("lease", name=name))
        return "over"

    def release(self, name: str) -> None:
        with contextlib.suppress(ClosedError):
            self._ask("release_lease", name=name)
