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

ONE, ZERO = (1, 1.0), (0, 0.0)

# name -> values accepted besides null; () is none
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # tools and forms of the answer
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": ANY,
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": ONE,
        # thinking and templates: `chat_template_kwargs` reaches the template
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "enable_thinking": (),
        "thinking_budget": (),
        "chat_template": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        # constraints beside those of `grammars`
        "bad_words": ([],),
        "allowed_token_ids": (),
        # lengths and ends
        "n_predict": (-1,),
        "min_tokens": (0,),
        "stop_token_ids": ([],),
        "truncate_prompt_tokens": (),
        "include_stop_str_in_output": (False,),
        # samplers
        "logits_processors": ([],),
        "repeat_penalty": ONE,
        "repeat_last_n": (-1,),  # the penalty looks at all tokens
        "repetition_context_size": (),
        "top_a": ZERO,
        "tfs_z": ONE,
        "typical_p": ONE,
        "typ_p": ONE,
        "top_n_sigma": (-1, -1.0),
        "dynatemp_range": ZERO,
        "xtc_probability": ZERO,
        "xtc_threshold": ANY,  # means something only with the name above
        "mirostat": (0,),
        "mirostat_tau": ANY,
        "mirostat_eta": ANY,
        "dry_multiplier": ZERO,
        # other weights
        "adapters": ([], ""),
        "lora": ([],),
        "draft_model": ("default_model",),
        # hints and book-keeping
        "num_draft_tokens": ANY,
        "prediction": ANY,  # a hint for speculation; the tokens are the same
        "cache_prompt": ANY,
        "prompt_cache_key": ANY,
        "prompt_cache_retention": ANY,
        "store": ANY,
        "metadata": ANY,
        "service_tier": ANY,
        "cache_control": ANY,
        "betas": ANY,
        "diagnostics": ANY,
        "inference_geo": ANY,
        "speed": ("standard",),
        "container": (),
        "mcp_servers": ([],),
        "context_management": (),
        "conversation": (),
        "compaction": (),
        "fallbacks": ([],),
        "billing_policy": (),
        "background": (False,),
        "background_options": ANY,
        "max_tool_calls": ANY,  # of tools that run at the server: there are none
        "moderation": (),
        "prompt_cache_options": ANY,
        "top_logprobs": ZERO,
        "safety_identifier": ANY,
    }
)


def check_neutral(
    extra: Mapping[str, Any] | None, more: Mapping[str, tuple[Any, ...]] | None = None
) -> list[str]:
    """Unknown names, in order; RequestError for a value that would change the answer."""
    extra, known = extra or {}, {**NEUTRAL, **(more or {})}
    for name, value in extra.items():
        if name in known and not _neutral(value, known[name]):
            message = f"{name}: this server does not support it; only a neutral value is accepted."
            raise invalid(message, name, "unsupported_parameter")
    return [name for name in extra if name not in known]


def _neutral(value: Any, options: tuple[Any, ...]) -> bool:
    if value is None or options is ANY:
        return True
    return any(type(value) is type(option) and value == option for option in options)


def warning(names: Iterable[str]) -> dict[str, str]:
    """The header that lists ignored names: percent-encoded, the first 20, 64 characters each."""
    listed = list(names)
    if not listed:
        return {}
    said = ", ".join(quote(name[:64], safe="[]") for name in listed[:20])
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    return {"warning": f'299 headrace "ignored: {said}{more}"'}
