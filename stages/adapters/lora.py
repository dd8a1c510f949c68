"""LoRA and DoRA folders, mounted at the start or while it runs; each row wears what its request asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from pipeline.errors import HeadraceError, OpenError, RequestError, below, nearest, outside, refuse
from pipeline.types import Device, Request, Target, Worn
from pipeline.types.places import user_path
from stages.adapters.fitting import SHOWN, digest_of, fitted
from stages.adapters.folder import Reading, adapter_files, read
from stages.adapters.layer import Delta, Site, put_site

GB = 1e9
MOST_GB = 1e9  # what a 64-bit number of bytes can say
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # no separator of a sum, no way to spell a path
NONE = "none"  # the id by which a request asks for no adapter
MOST_SCALE = 1e4
NOTHING = "Nothing is: start with 'adapters.folders={ID: FOLDER}'."
IDLE = "the model's code does not call this module"
LONGEST = 400  # letters of one of a folder's problems

Made = TypeVar("Made")


@dataclass(frozen=True)
class Mounted:
    """What an id stands for."""

    digest: str
    nbytes: int
    facts: Mapping[str, Any]


class Lora:
    """Adds low-rank deltas to the model's linear layers, row by row, in the one pass of all rows.

    `folders` maps ids to folders of mlx-lm or PEFT; `scales` multiplies an adapter's own scale.
    `default` (an id, or several: their sum) is what a request wears that says nothing. Together the
    adapters take at most `max_gb` (10^9 bytes), which limits set aside. `shelf` is a folder whose
    sub-folders may be mounted from afar, by their names; null: none may. ValueError for settings that
    cannot be; OpenError with everything that is wrong with any of the folders.
    """

    can = frozenset({"mount"})
    needs = {"model": frozenset({"adapt"})}

    def __init__(
        self,
        target: Target,
        device: Device,
        *,
        folders: Mapping[str, str],
        scales: Mapping[str, float],
        default: list[str] | str,
        max_adapters: int = 16,
        max_gb: float = 1.0,
        shelf: str | None = None,
    ):
        self.target, self.device = target, device
        self.folders, self.scales = dict(folders), dict(scales)
        self.default = (default,) if isinstance(default, str) else tuple(default)
        self.shelf = user_path(shelf) if shelf else None
        refuse(
            folders="; ".join(f"'{name}' {why}" for name in self.folders if (why := _no_id(name))),
            scales=self._strangers(self.scales) or _no_scales(self.scales),
            default=self._strangers(self.default),
            max_adapters=below(max_adapters, 1),
            max_gb=outside(max_gb, 0, MOST_GB),
        )
        self.max_adapters, self.max_bytes = max_adapters, round(max_gb * GB)
        self._mounted: dict[str, Mounted] = {}  # replaced whole: other threads read it
        self._sites: dict[str, Site] = {}

    def _strangers(self, names: Iterable[str]) -> str:
        """What is wrong with ids of which folders says nothing."""
        wrong = [name for name in names if name not in self.folders]
        hint = nearest(wrong[0], self.folders) or "Add it there." if wrong else ""
        return f"'{', '.join(wrong)}' is not among folders. {hint}" if wrong else ""

    @property
    def detail(self) -> str:
        return ",".join(self._mounted or self.folders)

    # --- life

    def files(self) -> dict[str, Path]:
        """Those of `folders`, and of all on the shelf that can be mounted."""
        read = self._of_folders(lambda name, place: adapter_files(place), self._no_shelf())
        for name, place in self._shelved().items():
            with suppress(OpenError):
                read[f"shelf/{name}"] = adapter_files(place)
        return {f"{name}/{file}": path for name in read for file, path in read[name].items()}

    def _shelved(self) -> dict[str, Path]:
        places = self.shelf.iterdir() if self.shelf else ()
        return {path.name: path for path in places if path.is_dir()}

    def open(self) -> None:
        def mount(name: str, place: Path) -> None:
            self._mount(name, place, self.scales.get(name, 1.0))

        self._of_folders(mount, self._no_shelf())

    def _of_folders(
        self, work: Callable[[str, Path], Made], wrong: Sequence[str] = ()
    ) -> dict[str, Made]:
        """What `work` makes of each folder. OpenError with all that is wrong, each by its config path."""
        made, wrong = dict[str, Made](), list(wrong)
        for name, folder in self.folders.items():
            try:
                made[name] = work(name, user_path(folder))
            except HeadraceError as error:
                wrong.append(f"adapters.folders.{name}: {error}")
        if wrong:
            raise OpenError("\n".join(wrong))
        return made

    def _no_shelf(self) -> list[str]:
        if self.shelf is None or self.shelf.is_dir():
            return []
        what = f"adapters.shelf: there is no folder {self.shelf}."
        return [f"{what} Make it, name another (adapters.shelf=FOLDER), or leave it out."]

    def close(self) -> None:
        gone, self._mounted = self._mounted, {}
        for mounted in gone.values():
            self._drop(mounted.digest)

    # --- what requests wear

    def check(self, request: Request) -> None:
        known = self._mounted
        for name in request.adapter or ():
            if name not in known:
                hint = f"{nearest(name, known)} Mounted: {', '.join(sorted(known))}.".strip()
                raise RequestError(
                    f"adapter: '{name}' is not mounted. {hint if known else NOTHING}",
                    param="adapter",
                    code="adapter_not_found",
                )

    def resolve(self, request: Request) -> Worn:
        self.check(request)
        asked = self.default if request.adapter is None else request.adapter
        return tuple(self._mounted[name].digest for name in asked)

    def holds(self, worn: Worn) -> bool:
        return {mounted.digest for mounted in self._mounted.values()}.issuperset(worn)

    def worn(self, rows: Sequence[Worn]) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self.target.row_adapters.worn(rows)
        return found

    @property
    def nbytes(self) -> int:
        return sum({m.digest: m.nbytes for m in self._mounted.values()}.values())

    def stats(self) -> list[dict[str, Any]]:
        return [
            {"id": name, "digest": mounted.digest, "bytes": mounted.nbytes, **mounted.facts}
            for name, mounted in self._mounted.items()
        ]

    # --- coming and going

    def mount(self, name: str, folder: str, scale: float) -> Mapping[str, Any]:
        if why := _no_id(name):
            raise RequestError(f"adapter: this id {why}", param="id")
        if why := _no_scale(scale):
            raise RequestError(f"adapter '{name}': its scale {why}", param="scale")
        try:
            self._mount(name, user_path(folder), scale)
        except RequestError as error:
            what = f"adapter '{name}': {error}"
            raise RequestError(what, param=error.param, code=error.code) from error
        return next(told for told in self.stats() if told["id"] == name)

    def _mount(self, name: str, place: Path, scale: float) -> None:
        reading, deltas = self._fitting(name, place, scale)
        digest, before = digest_of(deltas), self._mounted.get(name)
        facts = {"folder": place.name, "layout": reading.layout, "scale": scale}
        facts |= {"rank": max(t.rank for t in reading.modules.values()), "layers": len(deltas)}
        if not self.holds((digest,)):
            self._install(place, digest, deltas)
        self._mounted = {**self._mounted, name: Mounted(digest, _bytes(deltas), facts)}
        if before is not None:
            self._drop(before.digest)

    def _fitting(self, name: str, place: Path, scale: float) -> tuple[Reading, dict[str, Delta]]:
        """What the folder holds, as it is added; how much that is, is asked before it is read."""
        try:
            reading = read(place)
        except OpenError as error:
            raise RequestError(str(error), param="folder") from error
        deltas = dict[str, Delta]()
        problems = reading.problems or self._no_room(name, reading.nbytes)
        if not problems:
            widen = self.device.kind == "cpu"
            deltas, problems = fitted(reading, self.target.modules(), scale, widen=widen)
        problems = problems or self._no_room(name, _bytes(deltas))
        if problems:
            raise _refused(place, problems)
        return reading, deltas

    def unmount(self, name: str) -> None:
        if name not in self._mounted:
            hint = nearest(name, self._mounted)
            raise RequestError(
                f"adapter: no such id is mounted. {hint}".strip(), param="id", status=404
            )
        if name in self.default:
            raise RequestError(f"adapter: '{name}' is the default (adapters.default)", param="id")
        gone = self._mounted[name].digest
        self._mounted = {other: m for other, m in self._mounted.items() if other != name}
        self._drop(gone)

    def shelf_folder(self, name: str) -> str:
        if self.shelf is None:
            raise RequestError(
                "folder: adapters.shelf is not set, so nothing can be mounted by name"
            )
        try:
            known = self._shelved()
        except OSError as error:
            what = f"folder: adapters.shelf cannot be read: {error}. Make that folder"
            raise RequestError(what, param="folder") from error
        if name not in known:
            hint = nearest(name, known) or f"There are: {', '.join(sorted(known)) or 'none'}."
            raise RequestError(f"folder: no such folder on the shelf. {hint}", param="folder")
        return str(known[name])

    def _no_room(self, name: str, nbytes: int) -> list[str]:
        others = {other: m for other, m in self._mounted.items() if other != name}
        held = sum({m.digest: m.nbytes for m in others.values()}.values())
        found = []
        if len(others) >= self.max_adapters:
            found.append(
                f"{len(others)} others are mounted; adapters.max_adapters={self.max_adapters}"
            )
        if held + nbytes > self.max_bytes:
            room = f"adapters.max_gb allows {self.max_bytes:,} bytes"
            found.append(f"it takes {nbytes:,} bytes beside {held:,} of others; {room}")
        return found

    def _install(self, place: Path, digest: str, deltas: Mapping[str, Delta]) -> None:
        """Put the deltas on the layers, and build a pass to see that they are asked; else take them off."""
        modules, rows = self.target.modules(), self.target.row_adapters
        sites = {path: put_site(modules[path], path, rows) for path in deltas}
        stacks = {path: sites[path].stacked(digest, delta) for path, delta in deltas.items()}
        mx.eval([stack.arrays for kinds in stacks.values() for stack in kinds.values()])
        before = {path: (site.stacks, site.asked) for path, site in sites.items()}
        try:
            for path, site in sites.items():
                site.stacks = stacks[path]
            idle = (path for path, site in sites.items() if site.asked == before[path][1])
            if problems := self._rehearsed(digest) or [f"{path}: {IDLE}" for path in idle]:
                raise _refused(place, problems)
        except BaseException:
            for path, site in sites.items():
                site.stacks = before[path][0]
            raise
        self._sites |= sites

    def _rehearsed(self, digest: str) -> list[str]:
        """What keeps a pass in which one of three rows wears it from being built."""
        try:
            with self.worn([(digest,), (), ()]):
                self.target.hidden(mx.zeros((3, 2), mx.int32), None)  # type: ignore[arg-type]
        except ValueError as error:
            return [str(error)]
        return []

    def _drop(self, digest: str) -> None:
        """Take it off the layers, unless an id stands for it."""
        if not self.holds((digest,)):
            for site in self._sites.values():
                site.drop(digest)


def _no_id(name: str) -> str:
    """Why this cannot be an adapter's id; empty if it can."""
    if name == NONE:
        return "asks for no adapter, so no adapter can have it"
    wants = "letters, digits, '.', '_' and '-', at most 64, a letter or digit first"
    return "" if ID.fullmatch(name) else f"wants {wants}"


def _no_scale(scale: float) -> str:
    return outside(scale, -MOST_SCALE, MOST_SCALE)


def _no_scales(scales: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {why}" for name, scale in scales.items() if (why := _no_scale(scale)))


def _refused(place: Path, problems: Sequence[str]) -> RequestError:
    shown = [f"  - {problem[:LONGEST]}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        shown.append(f"  - and {len(problems) - SHOWN} more")
    return RequestError(
        "\n".join([f"{place} does not fit:", *shown]), param="folder", code="adapter_misfit"
    )


def _bytes(deltas: Mapping[str, Delta]) -> int:
    return sum(array.nbytes for delta in deltas.values() for array in delta.arrays)
