"""The engine's process as the server's sees it: started, talked to, and how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from pipeline.isolate.wire import Line, News

CHILD = "pipeline.isolate.child"


class EngineProcess:
    """To be made by a thread that outlives it: on Linux the child is killed when the thread that started it
    ends. `served` is pickled for it: it has an `open()` that gives an open engine. A `silent` one prints
    nothing: what is served has been said before, perhaps to somebody who has stopped reading."""

    def __init__(self, served: Any, *, silent: bool = False):
        ours, theirs = socket.socketpair()
        with theirs:
            # -P and the path of this process: a file in the working directory is not taken for a module
            command = [sys.executable, "-P", "-m", CHILD, str(theirs.fileno()), str(os.getpid())]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if silent else None,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(pickle.dumps(served))
        self.line = Line(ours, News)
        self._killed_for = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, why: str = "") -> None:
        self._killed_for = self._killed_for or why
        self._process.kill()

    def end(self, timeout_s: float | None = None) -> str:
        """Wait for its end, by force after the timeout; how it ended."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self.line.close()
        return self._killed_for or _told(code)


def _told(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
