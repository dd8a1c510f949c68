"""A stream of events as one plain dict: what `generate` returns and `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from pipeline.types import Delta, Done, Event, Failed, Origin, TokenLogprob


def until_done(take: Callable[[], Event]) -> Iterator[Delta | Done]:
    """Deltas as `take` gives them, then `Done`; a `Failed` is raised as its error."""
    while True:
        event = take()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Delta | Done):
            yield event
        if isinstance(event, Done):
            return


def collect(events: Iterable[Delta | Done]) -> dict[str, Any]:
    """Join all deltas and the last event."""
    text: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    origins: list[Origin] = []
    last: Done | None = None
    for event in events:
        if isinstance(event, Done):
            last = event
        else:
            text.append(event.text)
            ids += event.token_ids
            logprobs += event.logprobs
            origins += event.origins
    assert last is not None, "a stream without a last event"
    return {
        "text": "".join(text),
        "token_ids": ids,
        **asdict(last.usage),
        "finish_reason": last.finish_reason,
        "seed": last.seed,
        "timings": dict(last.timings),
        "speculation": asdict(last.speculation),
        **({"origins": [asdict(origin) for origin in origins]} if origins else {}),
        **({"logprobs": [asdict(entry) for entry in logprobs]} if logprobs else {}),
        **_of_prompt(last),
    }


def _of_prompt(last: Done) -> dict[str, Any]:
    if not last.prompt_logprobs:
        return {}
    return {"prompt_logprobs": [entry and asdict(entry) for entry in last.prompt_logprobs]}
