"""Small random checkpoints of any family, written and loaded in the real layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import below, nearest, refuse
from pipeline.identity import digest
from pipeline.types import Device
from stages.models.loading.families import COMMON, FAMILIES
from stages.models.loading.more_families import MORE
from stages.models.loading.paths import expand
from stages.models.local import Local


class Tiny(Local):
    """Written once to a folder named by its settings, then loaded as any local model is. ValueError
    names a setting that the family cannot have."""

    def __init__(
        self,
        device: Device,
        *,
        family: str = "llama",
        layers: int | None = None,
        window: int | None = None,
        head_size: int | None = None,
        seed: int = 0,
        folder: str | None = None,
        template: str | None = None,
        context: int | None = None,
        name: str | None = None,
        cache_dir: str | None = None,
        bits: int | None = None,
    ):
        known = {**MORE, **FAMILIES}
        if family not in known:
            names = f"{nearest(family, known)} Families: {', '.join(sorted(known))}."
            raise ValueError(f"family: no family named '{family}'. {names.strip()}")
        config = known[family]
        if window is not None and not config.window:
            raise ValueError(f"window: family {family} has no sliding window. Leave it out.")
        if layers is not None and family in MORE:
            raise ValueError(f"layers: family {family} has a fixed number of layers. Leave it out.")
        refuse(
            window=below(window, 1),
            layers=below(layers, config.min_layers),
            seed=below(seed, 0),
            head_size=below(head_size, 1),
        )
        super().__init__(
            device,
            path=family,
            template=template,
            context=context,
            name=name or f"tiny-{family}",
            cache_dir=cache_dir,
            bits=bits,
        )
        self.family, self.config = family, config
        self.layers, self.window, self.seed = layers, window, seed
        self.folder, self.head_size = folder, head_size

    def locate(self) -> Path:
        from stages.models.loading.checkpoint import VERSION, write

        family, config = self.config, self.configuration()
        key = digest({"config": config, "seed": self.seed, "version": VERSION})
        home = expand(self.folder) if self.folder else self.memory / "tiny"
        place = home / f"{self.family}-{key[:12]}"
        if not place.exists():
            write(place, family.module, config, self.seed, family.nested)
        return place

    def configuration(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        return configuration(
            self.family, layers=self.layers, window=self.window, head_size=self.head_size
        )


def configuration(
    family: str,
    *,
    layers: int | None = None,
    window: int | None = None,
    head_size: int | None = None,
) -> dict[str, Any]:
    """A tiny family's config.json; None leaves a number as the family has it."""
    known = {**MORE, **FAMILIES}[family]
    config = {**COMMON, **known.config, "model_type": known.module}
    if layers is not None:
        config["num_hidden_layers"] = layers
    if known.pattern:
        count = config["num_hidden_layers"]
        config[known.pattern] = (list(config[known.pattern]) * count)[:count]
    if window is not None:
        config[known.window] = window
    if head_size is not None:
        wider = {"global_head_dim": 2 * head_size} if "global_head_dim" in config else {}
        config |= {"head_dim": head_size, **wider}
    return config
