"""Grammars by llguidance: JSON schemas, regular expressions, choices, Lark and GBNF grammars.

Source: https://github.com/guidance-ai/llguidance. Masks are computed on the host from a trie of the
tokenizer's bytes; a mask is a bit for each token of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from pipeline.errors import RequestError
from pipeline.types import Dialect, Grammar, Matcher, Request, Target
from stages.constraints.bounds import too_long, too_much
from stages.constraints.none import Free
from stages.constraints.reasoning import after_reasoning

# Between the tokens of JSON; bounded, since weak models go on with white space for ever.
SPACES = r"[ \n\r\t]{0,40}"


class GrammarMatcher:
    """A `Matcher` over one `LLMatcher`."""

    free = False

    def __init__(self, matcher: Any, field: str):
        self._matcher, self._field = matcher, field

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_stopped())

    def mask(self, logits_V: Any) -> Any:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=None)[: len(logits_V)].view(bool)
        if self._matcher.is_error() or not allowed.any():
            raise self._fault("the grammar has no way on")
        legal_V = np.full_like(logits_V, -np.inf)
        np.copyto(legal_V[: len(allowed)], logits_V[: len(allowed)], where=allowed)
        return legal_V

    def push(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise self._fault(f"the grammar refuses token {token_id}")

    def _fault(self, what: str) -> Exception:
        """Too much work for the grammar's bounds is the request's fault; anything else is ours."""
        why = str(self._matcher.get_error()).partition("\n")[0][:300]
        if "TooComplex" in str(self._matcher.stop_reason()) or "too many" in why.lower():
            message = f"{self._field}: following it takes too much work: {why}"
            return RequestError(message, param=self._field)
        return RuntimeError(f"{what}: {why}")

    def restart(self, output_ids: Seq[int]) -> None:
        self._matcher.reset()
        for token in output_ids:
            self.push(token)

    def legal(self, token_ids: Seq[int]) -> int:
        return int(self._matcher.validate_tokens(list(token_ids))) if token_ids else 0

    def forced(self, limit: int) -> list[int]:
        return list(self._matcher.compute_ff_tokens())[:limit]


class LLGuidance:
    """Compiles a request's grammar to a matcher, in milliseconds for ordinary schemas.

    Nothing is forbidden in a reasoning section of the model's dialect. A row ends as soon as its
    grammar can take nothing more.
    """

    can = frozenset({"force"})

    def __init__(self) -> None:
        self._lock = Lock()
        self._vocabulary: tuple[Target, Any] | None = None

    def open(self) -> None:
        import llguidance

        self._library: Any = llguidance

    def close(self) -> None:
        self._vocabulary = None

    def bind(self, request: Request, target: Target, thinking: bool) -> Matcher:
        grammar = request.grammar
        matcher: Matcher = Free()
        if grammar is not None:
            matcher = self._compiled(grammar, target)
        return after_reasoning(matcher, request.reasoning_budget, target.tokenizer, thinking)

    def _compiled(self, grammar: Grammar, target: Target) -> GrammarMatcher:
        tokens = self._tokens(target)
        try:
            rules = _in_its_words(grammar, target.tokenizer.dialect)
            if why := too_much(rules):
                raise ValueError(why)
            matcher = self._library.LLMatcher(tokens, self._source(rules), log_level=0)
            wrong = matcher.get_error() or _without_beginning(matcher)
        # not even JSON, or too deep to be read, or a GBNF that cannot be translated
        except (ValueError, RecursionError) as error:
            wrong = str(error)
        if wrong:
            message = f"{grammar.field}: the {grammar.kind} cannot be compiled: {wrong[:1000]}"
            raise RequestError(message, param=grammar.field)
        return GrammarMatcher(matcher, grammar.field)

    def _source(self, grammar: Grammar) -> str:
        maker = self._library.LLMatcher
        if grammar.kind == "json_schema":
            spaces = (
                {"whitespace_flexible": False}
                if grammar.compact
                else {"whitespace_pattern": SPACES}
            )
            return str(maker.grammar_from_json_schema(grammar.source, overrides=spaces))
        if grammar.kind == "choice":
            words = (json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.source))
            return str(maker.grammar_from_lark("start: " + " | ".join(words)))
        return str(self._library.grammar_from(grammar.kind, grammar.source))

    def _tokens(self, target: Target) -> Any:
        """The target's vocabulary as the library wants it; built once, by the first who needs it."""
        with self._lock:
            if self._vocabulary is None or self._vocabulary[0] is not target:
                tokens = self._library.LLTokenizer(
                    self._library.TokenizerWrapper(Vocabulary(target)),
                    n_vocab=target.vocab_size,
                    eos_token=sorted(target.eos_ids),
                )
                self._vocabulary = target, tokens
            return self._vocabulary[1]


def _in_its_words(grammar: Grammar, dialect: Dialect) -> Grammar:
    """Calls of tools as the model's family marks them; any other grammar as it is."""
    if grammar.kind != "tools":
        return grammar
    wanted = json.loads(grammar.source)
    if why := too_long(wanted["answer"] or ""):  # a schema as text, which has not been read yet
        raise ValueError(why)
    return replace(grammar, kind="lark", source=dialect.grammar(**wanted))


def _without_beginning(matcher: Any) -> str:
    """What is wrong with a grammar that no token can begin."""
    if any(matcher.compute_bitmask()) and not matcher.is_error():
        return ""
    return str(matcher.get_error()).partition("\n")[0] or "nothing fits it"


class Vocabulary:
    """What llguidance asks of a tokenizer: bytes of all tokens, and how a text is spelled."""

    def __init__(self, target: Target):
        self._tokenizer = target.tokenizer
        self.eos_token_id, self.bos_token_id = min(target.eos_ids), None
        self.tokens = [self._tokenizer.token_bytes(i) for i in range(target.vocab_size)]
        self.special_token_ids = sorted(self._tokenizer.special_ids | target.eos_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)
