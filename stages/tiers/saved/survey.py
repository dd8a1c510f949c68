"""What of one namespace is on disk, in numbers that people read."""

from __future__ import annotations

from typing import Any

from stages.tiers.radix import WORD, unpack
from stages.tiers.saved.shelf import Run

FIRST = 8  # ids of a prefix that are shown


def survey(root: Run, shown: int) -> dict[str, Any]:
    """Of all runs below `root`. A prefix is what ends where nothing goes on: a leaf of the tree."""
    runs = [run for run in root.below() if run.file is not None]
    files = {file.name: file for run in runs for file in (run.file, *run.extras.values()) if file}
    ends = sorted((run for run in runs if not run.children), key=_use)
    return {
        "files": len(files),
        "tokens": sum(run.stop - run.start for run in runs),
        "bytes": sum(file.size for file in files.values()),
        "prefixes": len(ends),
        "hits": sum(file.hits for file in files.values()),
        "most_used": [_prefix(run) for run in ends[:shown]],
    }


def _prefix(end: Run) -> dict[str, Any]:
    own = [end]
    for run in list(end.chain())[1:]:
        if len(run.children) > 1:
            break
        own.append(run)
    files = {run.file.name: run.file for run in own if run.file}
    return {
        "tokens": end.stop,
        "own": end.stop - own[-1].start,
        "bytes": sum(file.size for file in files.values()),
        "hits": sum(file.hits for file in files.values()),
        "first": unpack(end.whole_key()[: FIRST * WORD]),
    }


def _use(run: Run) -> tuple[int, int]:
    return (-run.file.hits if run.file else 0, -run.stop)
