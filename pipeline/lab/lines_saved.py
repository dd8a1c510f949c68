"""Saved state: what a restart, a full index and a disk cost."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.lab import texts
from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import Bench, Line
from pipeline.lab.lines_engine import python
from pipeline.lab.sse import BenchError, get, order

PREFIX_TOKENS, MOST_PREFIXES = 2000, 6
SPILL_TOKENS = 48
CAPTURED_TOKENS = 192  # three times what is between two captures
BRANCHES = """
import json, sys, tempfile, pipeline
place = tempfile.mkdtemp()
disk = ("tier=[ram,disk]", f"tier.disk.path={place}", "tier.disk.reserve_gb=0")
with pipeline.load("smollm2", "drafter=none", *disk) as engine:
    prefix = [1000 + i * i * 31 % 40000 for i in range(2000)]
    for branch in range(50):
        own = [2000 + (branch * 101 + i * 7) % 45000 for i in range(100)]
        engine.generate([*prefix, 1500 + branch, *own[1:]], max_tokens=1, ignore_eos=True)
    assert engine.flush()["durable"]
    kv, model = (engine.pipeline.parts[name] for name in ("kv", "model"))
    one = engine.exclusive(lambda: kv.bytes_per_token(model))
    stats = engine.stats()["tiers"]["disk"]
    print(json.dumps([stats["bytes"], stats["tokens"], one]))
"""


def settings(place: Path) -> tuple[str, ...]:
    """Of the contestant with a disk. It writes whenever it can."""
    disk = ("tier=[ram,disk]", f"tier.disk.path={place / 'states'}", "tier.disk.reserve_gb=0")
    admin = f"server.socket={place / 'admin'}"
    return ("drafter=none", *disk, "stage.spill.debounce_s=0", admin)


def restart(bench: Bench) -> list[Figure]:
    """The same prefixes computed, read by the next server, and had in memory: seconds to a first token.
    Their files are not in the system's memory when they are read."""
    (one,) = bench.field.take("disk")
    count = max(2, min(bench.pairs, MOST_PREFIXES))
    known = [texts.cut(texts.prose(7000 + i, 400), PREFIX_TOKENS, one.count) for i in range(count)]
    cold = [_first(one, text, "Why?", 0) for text in known]
    order(one.setting("server.socket"), "/admin/cache/flush")
    place = Path(one.setting("tier.disk.path"))
    bench.field.dismiss("disk")
    _forget(place)
    (one,) = bench.field.take("disk")
    disk = [_first(one, text, "Who?", PREFIX_TOKENS * 0.9) for text in known]
    ram = [_first(one, text, "How?", PREFIX_TOKENS * 0.9) for text in known]
    note = f"{min(cold) * 1e3:.0f} ms cold, {{:.0f}} ms"
    title = f"first token behind {PREFIX_TOKENS:,} saved tokens, {{}}, of cold"
    return [
        ratio(
            f"saved/{name}", title.format(where), list(zip(warm, cold, strict=True)),
            Promise("<=", bound), note=note.format(min(warm) * 1e3),
        )
        for name, where, warm, bound in (
            ("disk", "from disk after a restart", disk, 0.05),
            ("ram", "from memory", ram, 0.03),
        )
    ]  # fmt: skip


def _first(one: Contestant, text: str, question: str, least: float) -> float:
    reply = one.complete(f"{text}\n{question}", max_tokens=1, ignore_eos=True)
    if reply.cached < least:
        raise BenchError(f"{reply.cached} tokens came from saved state, not {least:.0f}")
    return reply.first


def _forget(place: Path) -> None:
    """The system no longer has the files in memory (Linux)."""
    for path in place.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def spilling(bench: Bench) -> list[Figure]:
    """Tokens a second of an answer that follows another one whose state is being written meanwhile."""

    def measure(one: Contestant, index: int) -> float:
        ask = partial(one.complete, max_tokens=SPILL_TOKENS, ignore_eos=True)
        rates = [ask(texts.prose(20_000 + 10 * index + n, 4)).rate for n in range(3)]
        return statistics.mean(rates[1:])

    rounds, written = _beside(bench, "saved/decode", "disk", measure)
    title = "decode with tier=[ram,disk] and spilling, against tier=[ram]"
    note, holds = f"{written} files written meanwhile", written >= len(rounds)
    return [ratio("saved/decode", title, rounds, Promise(">=", 0.98), note=note, holds=holds)]


def capturing(bench: Bench) -> list[Figure]:
    """Tokens a second of one answer, of which a capture is written every 64 tokens meanwhile."""

    def measure(one: Contestant, index: int) -> float:
        text = texts.prose(30_000 + index, 4)
        return one.complete(text, max_tokens=CAPTURED_TOKENS, ignore_eos=True).rate

    rounds, written = _beside(bench, "saved/resumable", "resumable", measure)
    title = "decode with flow=resumable, a capture every 64 tokens, against tier=[ram]"
    note, holds = f"{written} files written meanwhile", written >= 3 * len(rounds)
    return [ratio("saved/resumable", title, rounds, Promise(">=", 0.97), note=note, holds=holds)]


def _beside(
    bench: Bench, what: str, writer: str, measure: Callable[[Contestant, int], float]
) -> tuple[list[tuple[float, float]], int]:
    """Pairs of rates of who writes and who does not, and how many files were written meanwhile."""
    written = 0

    def counted(one: Contestant, index: int) -> float:
        nonlocal written
        before = _written(one)
        rate = measure(one, index)
        written += _written(one) - before
        return rate

    rounds = bench.compare(what, (writer, "ours"), counted, lambda one: measure(one, 9000))
    return [(a, b) for a, b in rounds], written


def _written(one: Contestant) -> int:
    """Files that its disk has so far; 0 where it has none."""
    disk = json.loads(get(one.port, "/stats"))["tiers"].get("disk", {})
    return int(disk.get("written_files", 0))


def index(bench: Bench) -> list[Figure]:
    options = ("index", "--repeats", str(max(10, bench.pairs)))
    found = json.loads(python(bench, "-m", "stages.tiers.saved.measure", *options))
    worst = {
        name: max(tier[name] for tier in found.values()) for name in ("lookup", "insert", "bytes")
    }
    note = "; ".join(
        f"{name}: {tier['lookup']:.2f} ms, {tier['insert']:.2f} ms, {tier['bytes']:.0f} bytes"
        for name, tier in found.items()
    )
    among = "4,000 tokens among 100,000 saved prefixes"
    return [
        Figure(
            "saved/lookup",
            f"look-up of {among}",
            worst["lookup"],
            Promise("<=", 1),
            "ms",
            note=note,
        ),
        Figure("saved/insert", f"insertion of {among}", worst["insert"], Promise("<=", 1), "ms"),
        Figure("saved/index", "index, a stored token", worst["bytes"], Promise("<=", 64), "bytes"),
    ]


def files(bench: Bench) -> list[Figure]:
    """Bytes a second with checksums, over what the bare calls reach in the same minutes."""
    options = ("files", "--repeats", str(max(5, bench.pairs)))
    found = json.loads(python(bench, "-m", "stages.tiers.saved.measure", *options))
    figures = []
    for name, against, bound in (
        ("write", "write and fsync", 0.7),
        ("read", "readinto, cold", 0.5),
    ):
        pairs = list(zip(found[f"raw_{name}"], found[name], strict=True))  # seconds: inverted
        best = found["bytes"] / min(found[name]) / 1e6
        title = f"disk {name} with checksums, against a bare {against}"
        note = f"{best:,.0f} MB a second"
        figures.append(ratio(f"saved/{name}", title, pairs, Promise(">=", bound), note=note))
    return figures


def branches(bench: Bench) -> list[Figure]:
    stored, tokens, one = json.loads(python(bench, "-c", BRANCHES).splitlines()[-1])
    title = "bytes on disk of 50 branches of 2,000 tokens, of their unique tokens"
    note = f"{stored / 1e6:.0f} MB, {tokens:,} tokens"
    promise = Promise("<=", 1.15)
    return [Figure("saved/branches", title, stored / (tokens * one), promise, note=note)]


LINES = (
    Line(("saved/disk", "saved/ram"), restart, last=("disk",)),
    Line(("saved/decode",), spilling, last=("disk",)),
    Line(("saved/resumable",), capturing, last=("resumable",)),
    Line(("saved/lookup", "saved/insert", "saved/index"), index),
    Line(("saved/write", "saved/read"), files),
    Line(("saved/branches",), branches),
)
