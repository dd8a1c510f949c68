"""What is known of a pipeline once its parts are open: plain data for callers and servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def served(parts: Mapping[str, Any]) -> dict[str, Any]:
    """`engine.target_info`: the model as it is served, and what requests may ask of it."""
    model, limits = parts["model"], parts["limits"]
    return {
        "name": model.name,
        "context_len": min(limits.context or model.context_len, model.context_len),
        "vocab_size": model.vocab_size,
        "eos_ids": sorted(model.eos_ids),
        "max_open": limits.max_rows + limits.max_queue,  # requests
        "priorities": "priority" in parts["scheduler"].can or "park" in limits.can,
        "dtype": model.dtype,
        "weight_bytes": model.weight_bytes,
        "adapters": [told["id"] for told in parts["adapters"].stats()],
        "template": model.tokenizer.template is not None,
    }


def coverage(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What the KV policy does to the model."""
    kv = parts["kv"]
    return {"policy": dict(kv.identity), **kv.coverage(parts["model"])}
