"""The protocol of weight deltas on the target, which requests choose by id."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pipeline.types.parts import Part
from pipeline.types.request import Request

Worn = tuple[str, ...]  # digests of what a row wears, in the order in which they are added


class Adapters(Part, Protocol):
    """What is mounted, and what a row wears of it: settled when the row starts, the same to its end.

    A digest is of everything that an adapter adds, its scale included: two ids of equal content share
    one, and so share saved states. If `can` says "mount", adapters come and go while it is open.
    """

    nbytes: int  # of what is mounted; any thread
    max_bytes: int  # the most it may come to

    def check(self, request: Request) -> None:
        """RequestError for an id that is not mounted. Any thread; so it may be gone again later."""

    def resolve(self, request: Request) -> Worn:
        """What a row of this request wears if it starts now; RequestError as `check`."""

    def holds(self, worn: Worn) -> bool:
        """Whether all of it is still mounted."""

    def worn(self, rows: Seq[Worn]) -> AbstractContextManager[None]:
        """While inside, passes of the target are built with these, row by row. A row that wears
        nothing is computed as if there were no adapters."""

    def stats(self) -> Seq[Mapping[str, Any]]:
        """One mapping an id: `id`, `digest`, `bytes`, and where it came from. Any thread."""

    # Below: only if `can` says "mount"; on the owner's thread, while no row is in use.

    def mount(self, name: str, folder: str, scale: float) -> Mapping[str, Any]:
        """Read a folder and mount it under an id, in the place of what had this id; its stats.
        RequestError with everything that is wrong with it: then nothing has changed."""

    def unmount(self, name: str) -> None:
        """RequestError (404) for an id that is not mounted, and for one that is the default."""

    def shelf_folder(self, name: str) -> str:
        """The folder of that name on the shelf; RequestError for any other word."""
