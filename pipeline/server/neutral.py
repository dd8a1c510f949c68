"""Parameters that exist elsewhere and are not honoured here.

A neutral value (one that asks for what happens anyway) is accepted, any other is a 400 naming the
parameter. Names in neither table nor schema are ignored and listed in a `Warning` header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from pipeline.server.errors import invalid

ANY = ("anything",)  # cannot change the answer

# name -> values accepted besides null
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": ANY,
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "prediction": ANY,  # a hint for speculation; the tokens are the same
        "store": ANY,
        "metadata": ANY,
        "service_tier": ANY,
        "safety_identifier": ANY,
        "prompt_cache_key": ANY,
        "prompt_cache_retention": ANY,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "min_tokens": (0,),
        "stop_token_ids": ([],),
        "bad_words": ([],),
        "typical_p": (1, 1.0),
        "xtc_probability": (0, 0.0),
        "mirostat": (0,),
        "dry_multiplier": (0, 0.0),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": ([],),
        "guided_grammar": ("",),
        "structured_outputs": (),
        "grammar": ("",),
        "json_schema": (),
        "adapter": ("none", ""),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }
)


def check_neutral(extra: Mapping[str, Any]) -> list[str]:
    """Unknown names, in order; RequestError for a value that would change the answer."""
    for name, value in extra.items():
        if name in NEUTRAL and not _neutral(value, NEUTRAL[name]):
            message = f"{name}: this server does not support it; only a neutral value is accepted."
            raise invalid(message, name, "unsupported_parameter")
    return [name for name in extra if name not in NEUTRAL]


def _neutral(value: Any, options: tuple[Any, ...]) -> bool:
    if value is None or options is ANY:
        return True
    return any(type(value) is type(option) and value == option for option in options)


def warning(names: Iterable[str]) -> dict[str, str]:
    """The header that lists ignored names: percent-encoded, the first 20, 64 characters each."""
    listed = [quote(name[:64], safe="[]") for name in names]
    if not listed:
        return {}
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    return {"warning": f'299 headrace "ignored: {", ".join(listed[:20])}{more}"'}
