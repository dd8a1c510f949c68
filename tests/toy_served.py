"""What `IsolatedEngine` can be given to serve, for tests: pickled, and opened in another process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.served import Recipe


@dataclass(frozen=True)
class Served:
    """A recipe; from the moment that `flag` exists its process ends while it opens."""

    served: Recipe
    flag: Path = Path("/nowhere")

    @classmethod
    def of(cls, *overrides: str, recipe: str = "fake", flag: Path = Path("/nowhere")) -> Served:
        return cls(Recipe.of(recipe, ["debug=none", *overrides], ("toy_drafters.",)), flag)

    def open(self):
        if self.flag.exists():
            os._exit(7)
        return self.served.open()
