"""What `IsolatedEngine` can be given to serve, for tests: pickled, and opened in another process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.cli.served import Recipe
from pipeline.types import Delta


@dataclass(frozen=True)
class Served:
    """A recipe; from the moment that `flag` exists its process ends while it opens. A `fault` that exists
    is one of the engine's own thread, once, and one that is `stuck` hangs there. While `odd` exists, requests
    of that name get events that have no JSON. Who has the call `deadly` read ends it."""

    served: Recipe
    flag: Path = Path("/nowhere")
    fault: Path = Path("/nowhere")
    stuck: Path = Path("/nowhere")
    odd: Path = Path("/nowhere")

    @classmethod
    def of(cls, *overrides: str, recipe: str = "fake", **files: Path) -> Served:
        overrides = ("debug=none", "server.port=0", *overrides)  # whoever has 8080
        return cls(Recipe.of(recipe, overrides, ("toy_drafters.",)), **files)

    def open(self):
        if self.flag.exists():
            os._exit(7)
        engine = self.served.open()
        turn = engine._turns.turn

        def faulty(**what):
            if self.fault.exists():
                self.fault.unlink()
                raise RuntimeError("a fault in the engine's thread")
            if self.stuck.exists():
                self.stuck.unlink()
                time.sleep(60)
            turn(**what)

        engine._turns.turn = faulty
        dialect = engine.tokenizer.dialect
        dialect.calls = partial(self._read_call, dialect.calls)
        engine.submit = partial(self._submit, engine.submit)
        return engine

    def _read_call(self, read, *, text, tools):
        if text == "deadly":
            os._exit(7)
        return read(text, tools)

    def _submit(self, submit, request, deliver):
        def odd(event):
            deliver(replace(event, token_ids=(np.int64(1),)) if isinstance(event, Delta) else event)

        return submit(request, odd if request.id == "odd" and self.odd.exists() else deliver)
