"""A Python process that ends with its parent. It imports little: its start is measured, too.

    python -m pipeline.lab.tied DESCRIPTOR -m MODULE|-c CODE [ARGUMENT …]

The descriptor is the reading end of a pipe whose other end the parent alone holds. When that is closed, by
`Child.end` or because nobody is left to hold it, this process is told to end (SIGTERM), and soon made to.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 10.0  # for an end in order


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
