"""A progress bar on standard error (drawn on a terminal, silent elsewhere), and tables on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """Call it with what is being done, how much is done, and of how much."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as drawn:
        task = drawn.add_task("", total=None)
        yield lambda what, done, of: drawn.update(task, description=what, completed=done, total=of)


def out() -> Any:
    """Rich's console for tables: as wide as the terminal, or 140 columns in a file or a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)
