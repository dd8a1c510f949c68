"""Adapters of a running engine: what is mounted, and the commands that change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any

from pipeline.errors import RequestError
from pipeline.ownership import Work
from pipeline.types import Adapters


class Mounts:
    """`engine.adapters`. Safe on any thread but the owner's.

    `mount` and `unmount` block: admission is held until the rows that run have ended, then what is
    mounted changes between two rounds. A request that waits meanwhile gets what is mounted when it starts.
    """

    def __init__(self, parts: Mapping[str, Any], exclusive: Callable[[Work], Any]):
        self._parts, self._exclusive = parts, exclusive

    @property
    def _part(self) -> Adapters:
        part: Adapters = self._parts["adapters"]
        return part

    def listed(self) -> list[dict[str, Any]]:
        """One mapping an id: `id`, `digest`, `bytes`, folder, layout, scale, rank, layers."""
        return [dict(told) for told in self._part.stats()]

    def mount(self, name: str, folder: str | PathLike[str], scale: float = 1.0) -> dict[str, Any]:
        """Mount a folder under an id, in the place of what had this id. RequestError with everything
        that is wrong with it: then nothing has changed. For callers who may read files; who asks from
        afar names a folder on the shelf (`mount_shelved`)."""
        part = self._able()
        return dict(self._exclusive(lambda: part.mount(name, fspath(folder), scale)))

    def mount_shelved(self, name: str, folder: str, scale: float) -> dict[str, Any]:
        """`mount` of the sub-folder of `adapters.shelf` that has this name; any other word is refused."""
        return self.mount(name, self._able().shelf_folder(folder), scale)

    def unmount(self, name: str) -> None:
        """RequestError (404) for an id that is not mounted, and for one that is the default."""
        part = self._able()
        self._exclusive(lambda: part.unmount(name))

    def _able(self) -> Adapters:
        if "mount" in self._part.can:
            return self._part
        what = "adapters: none can be mounted here. Start with adapters=lora"
        raise RequestError(what, code="adapters_unavailable")

    def summary(self) -> Mapping[str, Any]:
        """For /stats: what is mounted and the bytes of it."""
        part = self._part
        return {"mounted": self.listed(), "bytes": part.nbytes, "max_bytes": part.max_bytes}
