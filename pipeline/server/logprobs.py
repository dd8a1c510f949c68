"""Log-probabilities in OpenAI's two forms: chat's list of objects, completions' parallel lists."""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from pipeline.types import PromptLogprob, Tokenizer, TokenLogprob

FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


class Logprobs(Protocol):
    """One choice's formatter; called with its tokens in order."""

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]: ...


class ChatLogprobs:
    """`{content: [{token, logprob, bytes, top_logprobs}]}`: one entry a delivered token.

    All `bytes` joined are the text's, but for what a stop string cut off. They are null for an EOS,
    which is no text: among the alternatives, or with `ignore_eos`.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], top: int):
        self._tokenizer, self._eos_ids, self._top = tokenizer, eos_ids, top

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        best = [self._token(token, logprob) for token, logprob in entry.top[: self._top]]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": best}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        shown = None if token_id in self._eos_ids else list(data)
        return {"token": text, "logprob": finite(logprob), "bytes": shown}


class ShownLogprobs:
    """Entries in chat's form of the tokens whose text is shown, found among those of all tokens: of an
    answer's reasoning and calls, and of what stands between them, none are."""

    def __init__(self, form: ChatLogprobs, tokenizer: Tokenizer):
        self._form, self._tokenizer = form, tokenizer
        self._waiting: list[tuple[bytes, TokenLogprob | None]] = []  # None: given out already

    def hear(self, entries: Iterable[TokenLogprob]) -> None:
        """Tokens in order, before the pieces that show them. Marks are nobody's text."""
        marks = self._tokenizer.dialect.shown
        known = ((self._tokenizer.token_bytes(e.token_id), e) for e in entries)
        self._waiting += [(data, e) for data, e in known if e.token_id not in marks]

    def take(self, text: str) -> list[dict[str, Any]]:
        """Those of the next piece; what stands before it is no text. A token that is split between two
        pieces comes with the first."""
        wanted = text.encode()
        begin = b"".join(data for data, _ in self._waiting).find(wanted)
        if begin < 0 or not wanted:
            return []
        found, at, data = [], 0, b""
        while at < begin + len(wanted):
            data, entry = self._waiting.pop(0)
            at += len(data)
            if at > begin and entry is not None:
                found.append(entry)
        if rest := at - begin - len(wanted):
            self._waiting.insert(0, (data[len(data) - rest :], None))
        content: list[dict[str, Any]] = self._form.take(found)["content"]
        return content


class TextLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`: offsets are characters of the returned
    text, and a token that is no whole text is written `bytes:\\x..`, as OpenAI does."""

    def __init__(self, tokenizer: Tokenizer, top: int):
        self._tokenizer, self._top = tokenizer, top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars = 0

    def take(self, entries: Sequence[TokenLogprob], first: float | None = 0.0) -> dict[str, Any]:
        """`first` None: these begin with a prompt, whose first token follows nothing."""
        form = self._lists(entries)
        if first is None:
            form["token_logprobs"][0] = form["top_logprobs"][0] = None
        return form

    def _lists(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._best(entry) for entry in entries],
            "text_offset": [self._offset(entry.token_id) for entry in entries],
        }

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The n best and the chosen one: n or n + 1 names."""
        pairs = (*entry.top[: self._top], (entry.token_id, entry.logprob))
        return {self._name(token): finite(logprob) for token, logprob in pairs}

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _offset(self, token_id: int) -> int:
        start = self._chars
        if token_id not in self._tokenizer.special_ids:
            self._chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start


def prompt_form(
    tokenizer: Tokenizer, entries: Sequence[PromptLogprob | None]
) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: null for the first token, then an object a token, from token ids (the
    prompt's own and the best) to `{logprob, rank, decoded_token}`. None if there are none."""
    return [None if entry is None else _ranked(tokenizer, entry) for entry in entries] or None


def _ranked(tokenizer: Tokenizer, entry: PromptLogprob) -> dict[str, Any]:
    best = [(token, logprob, 1 + at) for at, (token, logprob) in enumerate(entry.top)]
    shown = {token: (logprob, rank) for token, logprob, rank in best}
    shown[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token).decode("utf-8", errors="replace"),
        }
        for token, (logprob, rank) in shown.items()
    }


def finite(logprob: float) -> float:
    return max(float(logprob), FLOOR) if math.isfinite(logprob) else FLOOR
