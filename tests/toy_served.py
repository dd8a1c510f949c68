"""What `IsolatedEngine` can be given to serve, for tests: pickled, and opened in another process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.served import Recipe


@dataclass(frozen=True)
class Served:
    """A recipe; from the moment that `flag` exists its process ends while it opens. A `fault` that exists
    is one of the engine's own thread, once."""

    served: Recipe
    flag: Path = Path("/nowhere")
    fault: Path = Path("/nowhere")

    @classmethod
    def of(cls, *overrides: str, recipe: str = "fake", **files: Path) -> Served:
        return cls(Recipe.of(recipe, ["debug=none", *overrides], ("toy_drafters.",)), **files)

    def open(self):
        if self.flag.exists():
            os._exit(7)
        engine = self.served.open()
        turn = engine._turns.turn

        def faulty(**what):
            if self.fault.exists():
                self.fault.unlink()
                raise RuntimeError("a fault in the engine's thread")
            turn(**what)

        engine._turns.turn = faulty
        return engine
