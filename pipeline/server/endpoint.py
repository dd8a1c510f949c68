"""One path from a body to a reply, for every family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from pipeline.server.answer import Answer
from pipeline.server.asked import Bounds
from pipeline.server.body import read_body
from pipeline.server.caller import caller
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import JSON
from pipeline.server.metrics import Metrics
from pipeline.server.neutral import warning
from pipeline.server.pools import Pools
from pipeline.server.settings import ServerSettings
from pipeline.server.streaming import EventStream
from pipeline.server.writer import Family, Writer
from pipeline.types import Delta

ANSWER, WRITER = "headrace.answer", "headrace.writer"  # in a request's scope, for middleware


@dataclass(frozen=True)
class Generation:
    """POST of a family that generates. Works for each request on its own."""

    engine: ServedEngine
    settings: ServerSettings
    metrics: Metrics
    family: Family
    pools: Pools

    async def __call__(self, request: Request) -> Response:
        limits = bounds(self.engine, self.settings, request)
        read = partial(self.family.read, bounds=limits)
        asked = await read_body(request, self.settings, self.pools, read)
        answer = Answer(self.engine, asked, self.metrics, self.pools)
        request.scope[ANSWER] = answer
        try:
            await answer.open(request.receive)
            writer = await self.family.writer(answer, self.engine)
            request.scope[WRITER] = writer
            if asked.stream:
                return EventStream(
                    answer, writer, warning(asked.ignored), self.settings.keepalive_s
                )
            reply = await self._whole(answer, writer)
        except BaseException:
            answer.close()
            raise
        answer.close()
        return reply

    async def _whole(self, answer: Answer, writer: Writer) -> Response:
        deltas: list[list[Delta]] = [[] for _ in answer.choices]
        while not answer.finished:
            for item in await answer.events():
                if isinstance(item.event, Delta):
                    deltas[item.index].append(item.event)
        for voice, choice, said in zip(writer.voices, answer.choices, deltas, strict=True):
            assert choice.done is not None
            await voice.hear(said)
            await voice.end(choice.done)
        return JSON(await writer.whole(), headers=warning(answer.asked.ignored))


def bounds(engine: ServedEngine, settings: ServerSettings, request: Request) -> Bounds:
    info = engine.target_info
    return Bounds(
        info["vocab_size"],
        settings.max_choices,
        info["max_open"],
        caller(request),
        info["priorities"],
        info["name"],
        info["adapters"],
        engine.tokenizer.dialect,
    )
