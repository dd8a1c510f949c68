"""Serves from a process that has imported everything already, one server after another.

Reads a JSON list of command-line words a line; prints the server's process number, what it says itself,
and `ended`. Without imports a start takes a third of the time, so that many can be killed.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from stages.device import Device

Device().open()  # before anything imports mlx
LOADED = ("pipeline.build", "pipeline.engine", "pipeline.server.run", "stages.models.fake",
          "stages.kv.native", "stages.tiers.ram", "stages.tiers.disk", "stages.tokenize")  # fmt: skip


def main() -> None:
    for name in LOADED:
        import_module(name)
    from pipeline.cli import main as headrace

    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os._exit(headrace(json.loads(line)))
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
