"""How long `/health` takes, from a process of its own: the clients' threads would be in its figures.

    python -m pipeline.lab.soak.health PORT

Until its input ends; prints one JSON list of [monotonic seconds, seconds it took].
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

from pipeline.lab.children import Child
from pipeline.lab.soak.client import PATIENCE_S
from pipeline.lab.sse import get

EVERY_S = 0.05


def main() -> None:
    port, took, ended = int(sys.argv[1]), [], threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(EVERY_S):
        start = time.monotonic()
        get(port, "/health", PATIENCE_S)
        took.append([start, time.monotonic() - start])
    print(json.dumps(took))


class Prober:
    """Such a process."""

    def __init__(self, port: int):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = Child(["-m", "pipeline.lab.soak.health", str(port)], text=True, **pipes)

    def stop(self) -> list[list[float]]:
        told, _ = self._process.communicate()
        found: list[list[float]] = json.loads(told)
        return found


if __name__ == "__main__":
    main()
