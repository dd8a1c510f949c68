"""One engine that is asked over HTTP by whoever started it, and in this process when told to.

    python -m pipeline.lab.both_ways RECIPE [OVERRIDE ...]

Prints its port. Each line of standard input is a JSON list of questions: they are asked together by
`Engine.stream`, a thread each, and one JSON line tells how it went (`sse.Reply`'s fields).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pipeline.lab.children import Child
from pipeline.lab.contestants import environment
from pipeline.lab.sse import BenchError, Reply, post


def main(argv: Sequence[str] | None = None) -> int:
    recipe, *overrides = sys.argv[1:] if argv is None else argv
    import pipeline
    from pipeline.server.run import serve_in_thread
    from pipeline.server.settings import ServerSettings

    with (
        pipeline.load(recipe, *overrides) as engine,
        serve_in_thread(engine, ServerSettings()) as base,
        ThreadPoolExecutor(64) as pool,
    ):
        print(urlsplit(base).port, flush=True)
        for line in sys.stdin:
            questions, tokens = json.loads(line)
            replies = list(pool.map(partial(_stream, engine, tokens), questions))
            print(json.dumps([asdict(reply) for reply in replies]), flush=True)
    return 0


def _stream(engine: Any, tokens: int, question: str) -> Reply:
    from pipeline.types import Done

    reply = Reply(began=time.perf_counter())
    for event in engine.stream(question, max_tokens=tokens, temperature=0.0, ignore_eos=True):
        now = time.perf_counter() - reply.began
        if isinstance(event, Done):
            reply.seconds, reply.tokens = now, event.usage.completion_tokens
        elif event.text:
            reply.texts.append(event.text)
            reply.times.append(now)
    return reply


class BothWays:
    """Such a process, and its client. A context manager."""

    def __init__(self, recipe: str, *overrides: str, threads: int, clients: int):
        self._process = Child(
            ["-m", "pipeline.lab.both_ways", recipe, *overrides],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(threads),
            text=True,
        )
        self._pool = ThreadPoolExecutor(clients)
        self._port = int(self._line())

    def __enter__(self) -> BothWays:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()
        self._process.communicate()  # closes its input, which ends it

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchError(f"the engine's process ended with code {self._process.wait()}")
        return str(line)

    def inside(self, questions: Sequence[str], tokens: int) -> list[Reply]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([questions, tokens]) + "\n")
        self._process.stdin.flush()
        return [Reply(**told) for told in json.loads(self._line())]

    def over_http(self, questions: Sequence[str], tokens: int) -> list[Reply]:
        def ask(question: str) -> Reply:
            turn = {"role": "user", "content": question}
            body = {"messages": [turn], "max_tokens": tokens, "temperature": 0.0}
            return post(self._port, "/v1/chat/completions", {**body, "ignore_eos": True})

        return list(self._pool.map(ask, questions))


if __name__ == "__main__":
    raise SystemExit(main())
