"""What the server's process may ask of the engine beside requests. Both sides know it by these names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pipeline.engine import Engine

DIALECT = ("reasoning", "reasoning_ids", "tools", "native", "reads", "short_ids", "shown")

# these may wait for running answers
LONG = frozenset({"flush", "mount_adapter", "unmount_adapter"})


def calls(engine: Engine) -> Mapping[str, Callable[..., Any]]:
    """Name -> what answers it, in plain data."""
    text = engine.tokenizer
    dialect = text.dialect

    def read_calls(**what: Any) -> list[dict[str, Any]]:
        return [asdict(call) for call in dialect.calls(**what)]

    return {
        "stats": engine.stats,
        "describe": engine.describe,
        "flush": engine.flush,
        "close_session": engine.close_session,
        "adapters": engine.adapters.listed,
        "mount_adapter": engine.adapters.mount_shelved,
        "unmount_adapter": engine.adapters.unmount,
        "take_lease": engine.leases.take,
        "lease": engine.leases.state,
        "release_lease": engine.leases.release,
        "encode": text.encode,
        "render": text.render,
        "decode": text.decode,
        "calls": read_calls,
    }


def told_of(text: Any) -> dict[str, Any]:
    """The dialect's facts, for `Text`."""
    return {name: getattr(text.dialect, name) for name in DIALECT}
