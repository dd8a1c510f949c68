"""Python processes that end when this one does, however it ends: `pipeline.lab.tied` is their side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pipeline.lab.sse import BenchError
from pipeline.lab.tied import GRACE_S


class Child(subprocess.Popen[Any]):
    """`python ARGUMENTS`, tied to this process. `how` are Popen's own settings."""

    def __init__(self, arguments: Sequence[str], **how: Any):
        theirs, ours = os.pipe()
        self._tie = os.fdopen(ours, "wb")
        command = [sys.executable, "-m", "pipeline.lab.tied", str(theirs), *arguments]
        try:
            super().__init__(command, pass_fds=[theirs], **how)
        finally:
            os.close(theirs)

    def end(self) -> int:
        """Its exit code; it is told to end if it has not."""
        self._tie.close()
        try:
            return self.wait(GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


def output(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Standard output of a process that does one thing. BenchError with what it said if it fails."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Child(arguments, text=True, env=env, **pipes) as child:
        try:
            out, err = child.communicate()
        finally:
            code = child.end()
    if code:
        raise BenchError(f"{' '.join(arguments)[:60]} failed: {(err or out)[-2000:]}")
    return str(out)


def end_in_order() -> None:
    """From now on SIGTERM and SIGHUP end this process as an exception does: children are ended, and
    nothing half-written stays."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
