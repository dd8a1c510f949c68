"""No adapters: the target's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.types import Request


class NoAdapters:
    """The null object of adapters; adds nothing to the namespace."""

    can = frozenset[str]()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def identity(self, request: Request) -> Mapping[str, Any]:
        return {}
