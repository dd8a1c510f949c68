"""The log: lines of JSON, one a request. No line has a prompt or an answer in it unless that was asked for."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from logging.handlers import WatchedFileHandler
from typing import Any

from pipeline.errors import ConfigError, Problem
from pipeline.server.answer import Answer
from pipeline.server.voices import Voice
from pipeline.types import Request
from pipeline.types.places import user_path

requests = logging.getLogger("headrace.requests")


class Lines(logging.Formatter):
    """Every record as one line of ASCII JSON, so that nothing a client sends can make two of it."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, Any] = {"time": f"{at}.{int(record.msecs):03}Z"}
        said |= {"level": record.levelname.lower(), "logger": record.name}
        said |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, separators=(",", ":"), default=str)


def begin(file: str | None = None) -> None:
    """Log to standard error, or from now on to this file, which may be moved away and is opened anew then.
    ConfigError if it cannot be written."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        path = user_path(file)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            handler = WatchedFileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError([Problem("server.log", f"cannot be written: {error}")]) from error
    handler.setFormatter(Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=file is not None)


def books(answer: Answer, voices: list[Voice], *, prompts: bool) -> dict[str, Any]:
    """What an answer cost and how it ended, also of one that was cut."""
    usage = answer.usage
    said = {
        "answer": answer.asked.id,
        "stream": answer.asked.stream,
        "choices": len(answer.choices),
        **vars(usage),
        "finish_reason": _reason(answer, voices),
        "queue_s": _seconds([c.done.timings.get("queue") for c in answer.choices if c.done]),
        "ttft_s": _seconds([c.first - answer.began for c in answer.choices if c.first]),
    }
    if prompts:
        said["prompts"] = [_prompt(r) for r in answer.asked.requests[:: answer.asked.n]]
        said["answers"] = [voice.content for voice in voices]
    return said


def _reason(answer: Answer, voices: list[Voice]) -> str:
    """Of the first choice that has one; else how the answer was cut."""
    reasons = [voice.finish_reason for voice in voices if voice.done]
    return reasons[0] if reasons else answer.outcome


def _seconds(found: list[float | None]) -> float | None:
    known = [seconds for seconds in found if seconds is not None]
    return round(min(known), 4) if known else None


def _prompt(request: Request) -> Any:
    return request.messages or request.text or request.token_ids


def wanted() -> bool:
    return requests.isEnabledFor(logging.INFO)


def write(fields: Mapping[str, Any]) -> None:
    requests.info("request", extra={"fields": dict(fields)})
