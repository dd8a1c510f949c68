"""No adapters: the target's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from pipeline.errors import RequestError
from pipeline.types import Request, Worn


class NoAdapters:
    """The null object of adapters: every row wears nothing."""

    can = frozenset[str]()
    nbytes = max_bytes = 0

    def open(self) -> None: ...

    def close(self) -> None: ...

    def check(self, request: Request) -> None:
        if request.adapter:
            raise RequestError(
                "adapter: nothing is mounted. Start with adapters=lora 'adapters.folders={ID: FOLDER}'",
                param="adapter",
                code="adapter_not_found",
            )

    def resolve(self, request: Request) -> Worn:
        self.check(request)
        return ()

    def holds(self, worn: Worn) -> bool:
        return not worn

    def worn(self, rows: Sequence[Worn]) -> AbstractContextManager[None]:
        return nullcontext()

    def stats(self) -> list[dict[str, str]]:
        return []
