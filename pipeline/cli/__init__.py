"""The command line: `headrace VERB …`. One file a verb; this one reads arguments and says what is wrong.

Exit codes: 0 well, 2 something the user can mend (all of it listed), 1 our fault, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from pipeline.cli.arguments import UsageError, parse
from pipeline.errors import ConfigError, HeadraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        say_warnings_plainly()
        return _run(words)


def say_warnings_plainly() -> None:
    """One line each, and each once: where in our files it was found helps nobody."""
    said: set[str] = set()

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show


def _run(words: list[str]) -> int:
    again = ""
    try:
        args = parse(words)
        again = getattr(args.verb, "AGAIN", "")
        return int(args.verb.run(args))
    except SystemExit as exit:  # --help
        return int(exit.code or 0)
    except KeyboardInterrupt:
        if again:
            print(f"interrupted. {again}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `headrace show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--traceback" in words:
            traceback.print_exc()
        return _explain(error)


def _explain(error: Exception) -> int:
    """Say what went wrong on standard error; 2 if the user can mend it, else 1."""
    if isinstance(error, ConfigError):
        count = len(error.problems)
        what = "does not fit together" if type(error).__name__ == "GraphError" else "is not right"
        noun = "1 problem" if count == 1 else f"{count} problems"
        print(f"error: the configuration {what}, {noun}:\n{error}", file=sys.stderr)
        return 2
    if isinstance(error, UsageError | HeadraceError):
        print(f"error: {error}", file=sys.stderr)
        return 2
    what = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"internal error, our fault: {what} (--traceback shows where)", file=sys.stderr)
    return 1
