"""Python processes that end when this one does, however it ends.

    python -m pipeline.lab.children DESCRIPTOR -m MODULE|-c CODE [ARGUMENT …]

The descriptor is the reading end of a pipe whose other end the parent alone holds. When that is closed, by
`Child.end` or because nobody is left to hold it, the child is told to end (SIGTERM), and soon made to.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

GRACE_S = 10.0  # for an end in order


class Child(subprocess.Popen[Any]):
    """`python ARGUMENTS`, tied to this process. `how` are Popen's own settings."""

    def __init__(self, arguments: Sequence[str], **how: Any):
        theirs, ours = os.pipe()
        self._tie = os.fdopen(ours, "wb")
        command = [sys.executable, "-m", __name__, str(theirs), *arguments]
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
    from pipeline.lab.sse import BenchError

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


def main() -> None:
    descriptor, kind, what, *rest = sys.argv[1:]
    threading.Thread(target=_watch, args=(int(descriptor),), daemon=True).start()
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def _watch(tie: int) -> None:
    os.read(tie, 1)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)  # it may be waiting: others would not wake it
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
