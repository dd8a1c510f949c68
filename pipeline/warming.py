"""Prompts computed ahead, so that later requests that begin alike start from saved state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.asking import Prompt
from pipeline.errors import ConfigError, Problem, RequestError


class Warmed(Protocol):
    """What is needed of an open engine with flow `warm`."""

    def generate(self, prompt: Prompt, **wanted: Any) -> dict[str, Any]: ...
    def flush(self, timeout_s: float) -> dict[str, Any]: ...


@dataclass
class Report:
    """What was done: `tokens` of all prompts, `cached` of them known before; `refused` by line."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[int, str] = field(default_factory=dict)
    flush: Mapping[str, Any] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        return not self.refused and bool(self.flush.get("durable"))


def read_prompts(text: str, where: str) -> dict[int, tuple[Prompt, dict[str, Any]]]:
    """Prompts by line: a line of text is a user's turn; a JSON object has `messages`, or `prompt`,
    which is taken as it is, and may name an `adapter`. ConfigError that names every line that is neither."""
    found, problems = {}, list[Problem]()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                found[number] = _prompt(line.strip())
        except (ValueError, TypeError, KeyError):
            wants = 'wants a text, {"messages": [{"role": …, "content": …}]} or {"prompt": "…"}'
            problems.append(Problem(f"{where}:{number}", wants))
    if not found and not problems:
        problems.append(Problem(where, "has no prompts.", "One a line."))
    if problems:
        raise ConfigError(problems)
    return found


def _prompt(line: str) -> tuple[Prompt, dict[str, Any]]:
    if not line.startswith("{"):
        return line, {}
    asked = json.loads(line)
    worn = {"adapter": asked.pop("adapter", None)}
    ((name, value),) = asked.items()
    if name == "messages" and all({"role", "content"} <= message.keys() for message in value):
        return value, worn
    if name == "prompt" and isinstance(value, str) and value:
        return value, {"raw": True, **worn}
    raise ValueError(name)


def warm(
    engine: Warmed,
    prompts: Mapping[int, tuple[Prompt, dict[str, Any]]],
    numbers: Iterable[int],
    flush_s: float = 600.0,
) -> Report:
    """Compute the prompts of these lines and write all of it."""
    report = Report()
    for number in numbers:
        prompt, wanted = prompts[number]
        try:
            _count(report, engine.generate(prompt, max_tokens=1, **wanted))
        except RequestError as error:
            report.refused[number] = str(error)
    report.flush = engine.flush(flush_s)
    return report


def _count(report: Report, result: Mapping[str, Any]) -> None:
    report.counts += Counter(
        prompts=1, tokens=result["prompt_tokens"], cached=result["cached_tokens"]
    )


def told(report: Report) -> Iterable[str]:
    """The report in lines, for people."""
    counts, flush = report.counts, report.flush
    for number, error in report.refused.items():
        yield f"line {number}: {error}"
    yield (
        f"{counts['prompts']} prompts of {counts['tokens']:,} tokens, {counts['cached']:,} of them known; "
        f"{flush.get('flushed', 0)} files and {flush.get('bytes', 0) / 1e6:.1f} MB written"
    )
    if not flush.get("durable"):
        yield f"not all of it is on disk: {dict(flush)}"
