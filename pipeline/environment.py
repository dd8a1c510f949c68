"""Which values come from the environment. A reference does not say where it leads (`${model.path}`), so
reading is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Reads(threading.local):
    count = 0


_reads = _Reads()


def reads() -> int:
    """How often the environment has been read on this thread."""
    return _reads.count


def counted(read: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and `reads` knows of it."""

    def counting(*words: Any) -> Any:
        _reads.count += 1
        return read(*words)

    return counting
