"""`headrace demo [RECIPE] [key=value …]`: the whole product once, over real HTTP."""

from __future__ import annotations

import http.client
import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pipeline.cli.arguments import add_recipe

PROMPT = "Write a short Python class for a bank account with deposit and withdraw, then show how it is used."


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what is asked")
    parser.add_argument("--max-tokens", type=int, default=240, metavar="N")


def run(args: Namespace) -> int:
    from pipeline.build import pipeline_to_run
    from pipeline.drawing import as_text
    from pipeline.engine import Engine
    from pipeline.server.run import serve_in_thread

    built = pipeline_to_run(args.recipe, args.overrides, args.allow_code)
    print(as_text(built.graph))
    began = time.perf_counter()
    with Engine(built) as engine, serve_in_thread(engine, built.settings["server"]) as url:
        name = engine.target_info["name"]
        print(f"{name} is ready at {url} after {time.perf_counter() - began:.1f} s\n")
        print(f"> {args.prompt}\n")
        answer = _chat(url, name, args.prompt, args.max_tokens)
        _print_tables(answer, _get(url, "/stats"))
    return 0


def _chat(url: str, model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Ask, print the text as it arrives, return what a client can measure."""
    body = {
        "model": model, "stream": True, "max_tokens": max_tokens, "temperature": 0,
        "messages": [{"role": "user", "content": prompt}],
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    for chunk in _stream(url, "/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            first = first or (time.perf_counter() if text else 0.0)
            print(text, end="", flush=True)
    ended = time.perf_counter()
    print("\n")
    return {"ttft": first - began, "seconds": ended - first, **usage}


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)


def _stream(url: str, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON chunks of a server-sent-event reply."""
    connection = _connect(url)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {reply.read().decode()}")
    for line in reply:
        data = line.decode().removeprefix("data:").strip()
        if line.startswith(b"data:") and data != "[DONE]":
            yield json.loads(data)
    connection.close()


def _get(url: str, path: str) -> dict[str, Any]:
    connection = _connect(url)
    connection.request("GET", path)
    answer: dict[str, Any] = json.load(connection.getresponse())
    connection.close()
    return answer


def _print_tables(answer: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_stage_table(stats["stage_seconds"]))
    console.print(_speed_table(answer, stats))


def _stage_table(seconds: Mapping[str, float]) -> Any:
    from rich.table import Table

    table = Table("stage", "ms", "share", title="time per stage", title_justify="left")
    total = sum(seconds.values()) or 1.0
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{spent * 1e3:.1f}", f"{spent / total:.0%}")
    return table


def _speed_table(answer: Mapping[str, Any], stats: Mapping[str, Any]) -> Any:
    from rich.table import Table

    counts, tokens = stats["counts"], answer.get("completion_tokens", 0)
    drafted, accepted, rounds = (counts.get(k, 0) for k in ("drafted", "accepted", "rounds"))
    table = Table("speed and speculation", "", title_justify="left")
    table.add_row("prompt tokens", str(answer.get("prompt_tokens", 0)))
    cached = (answer.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    table.add_row("of these from saved state", str(cached))
    table.add_row("first token after", f"{answer['ttft'] * 1e3:.0f} ms")
    table.add_row(
        "answer", f"{tokens} tokens, {tokens / max(answer['seconds'], 1e-9):.1f} a second"
    )
    table.add_row("passes of the model", f"{stats['target_calls']}, {rounds} of them decode rounds")
    table.add_row("drafted", f"{drafted} tokens")
    table.add_row("accepted", f"{accepted} ({accepted / drafted:.0%})" if drafted else "0")
    table.add_row("tokens a round", f"{tokens / rounds:.2f}" if rounds else "-")
    return table
