"""Affine codes of as many bits in each layer as it needs: a published `kv_config.json`, or one of ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import LayerSpec, Target
from pipeline.types.places import user_path
from stages.kv.coded import Coded, Pair
from stages.kv.scheme import Scheme

MAPS = Path(__file__).parent / "maps"  # shipped, by name
KEYS = ("layer_idx", "bits", "k_bits", "v_bits", "group_size")
GROUP = 64  # where an entry says none


class PerLayer(Coded):
    """`map`: a file, or the name of one in stages/kv/maps/. A JSON list of {layer_idx, bits,
    group_size}; `k_bits` and `v_bits` say more than `bits` does; layers not listed are kept. An empty one
    is for models that have nothing to code.

    `layer_idx` counts the layers that keep state, in the model's order (as the published format's
    servers look it up); a layer that keeps several states has one number."""

    def __init__(self, *, map: str, start: int = 0):
        super().__init__(start)
        self.map = map
        self.entries: dict[int, Pair] = {}
        self.identity: Mapping[str, Any] = {"kv": "per_layer", "map": map, "start": start}

    def place(self) -> Path:
        """The map's file."""
        shipped = MAPS / f"{self.map}.json"
        return shipped if shipped.is_file() else user_path(self.map)

    def files(self) -> dict[str, Path]:
        _read(place := self.place())
        return {place.name: place}

    def open(self) -> None:
        place = self.place()
        listed = _read(place)
        self.entries = _entries(f"kv.map: {place}", listed)
        layers = sorted(map(_canonical, listed))
        self.identity = {"kv": "per_layer", "layers": layers, "start": self.start}

    def pairs(self, target: Target) -> Mapping[int, Pair]:
        places = list(numbered(target.specs))
        pairs = zip(places, target.specs, strict=True)
        fit = list(dict.fromkeys(place for place, spec in pairs if spec.codable))
        unfit = [i for i in self.entries if i not in fit]
        if unfit:
            raise OpenError(
                f"kv.map: {self.map} lists layers {sorted(unfit)}, which {target.name} does not have or "
                f"which keep no keys and values to code. It has {len(set(places))} layers; these can be: {fit}."
            )
        if fit and not self.entries:
            raise OpenError(
                f"kv.map: {self.map} lists no layer; of {target.name} these can be coded: {fit}. "
                "List some, or leave them all as they are: kv=native."
            )
        return {
            index: self.entries[place]
            for index, (place, spec) in enumerate(zip(places, target.specs, strict=True))
            if place in self.entries and spec.codable
        }


def numbered(specs: Iterable[LayerSpec]) -> Iterable[int]:
    """Each spec's layer: those of one group share a number."""
    number, group = -1, -1
    for spec in specs:
        number += not (spec.group >= 0 and spec.group == group)
        group = spec.group
        yield number


def _read(place: Path) -> list[Mapping[str, Any]]:
    ours = ", ".join(sorted(path.stem for path in MAPS.glob("*.json")))
    try:
        listed = json.loads(place.read_text())
    except (OSError, ValueError) as error:
        raise OpenError(f"kv.map: {place} cannot be read: {error}. Shipped: {ours}.") from error
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise OpenError(f"kv.map: {place} is no list of {{layer_idx, bits, group_size}}.")
    return listed


def _entries(where: str, listed: list[Mapping[str, Any]]) -> dict[int, Pair]:
    """All mistakes at once."""
    said = [problem for entry in listed for problem in _problems(entry)]
    if not said:
        counts = Counter(entry["layer_idx"] for entry in listed)
        said = [f"layer {index} is there {n} times" for index, n in counts.items() if n > 1]
    if said:
        raise OpenError(f"{where}: {'; '.join(said)}.")
    return {entry["layer_idx"]: _pair(entry) for entry in listed}


def _problems(entry: Mapping[str, Any]) -> list[str]:
    what = f"layer {entry.get('layer_idx', '?')}"
    unknown = sorted(set(entry) - set(KEYS))
    numbers = [entry[key] for key in KEYS if key in entry]
    if unknown:
        return [f"{what}: unknown {', '.join(unknown)} (known: {', '.join(KEYS)})"]
    if any(type(number) is not int or number < 0 for number in numbers) or "layer_idx" not in entry:
        return [f"{what}: wants whole numbers from 0, and a layer_idx, got {dict(entry)}"]
    if "bits" not in entry and not {"k_bits", "v_bits"} <= set(entry):
        return [f"{what}: says no bits"]
    return [f"{what}: {said}" for scheme in _pair(entry) if (said := scheme.refusal())]


def _pair(entry: Mapping[str, Any]) -> Pair:
    bits, group = entry.get("bits", 0), entry.get("group_size", GROUP)
    keys, values = (entry.get(name, bits) for name in ("k_bits", "v_bits"))
    return Scheme("k_bits", keys, group), Scheme("v_bits", values, group)


def _canonical(entry: Mapping[str, Any]) -> list[int]:
    keys, values = _pair(entry)
    return [entry["layer_idx"], keys.bits, values.bits, keys.group or 0]
