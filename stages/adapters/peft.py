"""PEFT's numbers that differ by module: `rank_pattern`, `alpha_pattern`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NAME = re.compile(r"\^?[\w-]+(\\?\.[\w-]+)*\$?")
MOST = 1e9  # no setting of a low-rank product is anywhere near


class ByModule:
    """A number for every module: of the first key that ends the module's name, else the one for all.

    To PEFT keys are expressions, of which some match for hours. Here they are what it writes itself and its
    documents show: a module's name or the last parts of one, after `^` the whole name. Others are `problems`.
    """

    def __init__(self, config: Mapping[str, Any], usual: str, pattern: str, least: float):
        """`usual` and `pattern`: the names of the settings; `least`: of their numbers."""
        said = config.get(pattern) or {}
        self._usual = config.get(usual)
        wants = f"wants a number, {least:g} to {MOST:g}"
        self._numbers: dict[str, tuple[int, Any]] = {}  # plain key -> its turn and its number
        self.problems: list[str] = []
        if not is_number(self._usual, least):
            self.problems.append(f"{usual}: {wants}, got {self._usual!r}")
        if not isinstance(said, dict):
            self.problems.append(f"{pattern}: wants numbers by module, got {said!r}")
            return
        for key, number in said.items():
            if NAME.fullmatch(key) is None:
                what = "is no module's name or end of one (q_proj, layers.0.q_proj). Write them out"
                self.problems.append(f"{pattern}: {key!r:.60} {what}")
            elif not is_number(number, least):
                self.problems.append(f"{pattern}: {key!r:.60} {wants}, got {number!r}")
            else:
                plain = key.replace("\\", "").removesuffix("$")
                self._numbers.setdefault(plain, (len(self._numbers), number))

    def __getitem__(self, path: str) -> Any:
        found = [self._numbers[end] for end in _ends(path) if end in self._numbers]
        return min(found)[1] if found else self._usual


def _ends(path: str) -> Iterator[str]:
    """What ends a module's name: `^` and the whole of it, the whole, and what follows each dot."""
    yield f"^{path}"
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def is_number(value: Any, least: float = -MOST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MOST
