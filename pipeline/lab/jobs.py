"""One measurement in a process of its own: what a sweep runs for each point.

    python -m pipeline.lab.jobs <job.json

Standard input is one line, the job; standard output is one: the result, or why there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.errors import HeadraceError
from pipeline.lab.children import end_in_order
from pipeline.lab.sse import BenchError

OK, FAILED = "ok", "failed"


@dataclass(frozen=True)
class Job:
    """What is measured, as plain data. `quality_tokens` 0: quality is not wanted. Relative paths begin in
    `folder`, where there is one of that name."""

    recipe: str
    overrides: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    repeats: int = 3
    quality_tokens: int = 0
    folder: str = ""

    @classmethod
    def from_json(cls, text: str) -> Job:
        said = json.loads(text)
        lists: dict[str, Any] = {name: tuple(said.pop(name)) for name in ("overrides", "allow")}
        return cls(**said, **lists)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run(job: Job) -> dict[str, Any]:
    """The job's result, or `{"status": "failed", "reason": …}`: a point that fails is a line of the
    table, not the end of a sweep."""
    try:
        return {"status": OK, **_measured(job)}
    except (HeadraceError, BenchError, OSError) as error:
        return {"status": FAILED, "reason": str(error)}
    except Exception as error:  # ours: it must not cost the other points
        return {"status": FAILED, "reason": f"our fault: {type(error).__name__}: {error}"}


def _measured(job: Job) -> dict[str, Any]:
    from pipeline.lab.comparison import measure, result
    from pipeline.lab.sides import Checked

    checked = Checked.of(job.recipe, job.overrides, job.allow)
    with TemporaryDirectory(prefix="headrace-") as folder:
        side = checked.side(checked.name, Path(folder))
        found = result([side], measure([side], checked.workload, job.repeats))
    if job.quality_tokens:
        figures, tokens = quality(job)
        found["contestants"][0]["figures"] |= figures
        found["contestants"][0]["quality_tokens"] = tokens
    return found


def quality(job: Job) -> tuple[dict[str, Any], int]:
    """KL, top-1 agreement and perplexity of the point's KV policy against native, on our own text, and
    how many of its tokens were scored."""
    from pipeline.lab import quality as lab
    from pipeline.lab.metrics import spread
    from pipeline.lab.texts import read

    asked = lab.chosen(job.recipe, job.overrides, job.allow)
    text = "\n\n".join(map(read, ("survey", "mill")))
    report = lab.measure(asked, text, [job.quality_tokens], lambda _: None)
    (outcome,) = report["outcomes"]
    if outcome.whole is None:
        raise HeadraceError(outcome.refused)
    line = outcome.whole
    found = {"kl": line.kl, "top1": line.top1, "perplexity": line.perplexity}
    return {name: spread([value]) for name, value in found.items()}, line.tokens


def main() -> int:
    """The only lines on standard output are ours: what else prints goes to standard error."""
    out, job = sys.stdout, Job.from_json(sys.stdin.readline())
    end_in_order()
    with contextlib.suppress(OSError):  # a cluster's machine has another folder of its own
        os.chdir(job.folder)
    with contextlib.redirect_stdout(sys.stderr):
        found = run(job)
    print(json.dumps(found), file=out, flush=True)
    return 0


def parse(text: str, code: int, told: str) -> Mapping[str, Any]:
    """What a job's process printed; if it died, how, and the end of what it said."""
    try:
        found: Mapping[str, Any] = json.loads(text.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return {"status": FAILED, "reason": f"the process ended with {how}: {told[-1000:].strip()}"}


if __name__ == "__main__":
    raise SystemExit(main())
