"""A tokenizer from a GGUF file's metadata, with the `tokenizers` library alone.

transformers' way to read it imports torch. Two kinds exist in practice: byte-level BPE ("gpt2",
with a `pre` word naming how text is first split) and SentencePiece-style BPE ("llama").
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import OpenError
from pipeline.identity import digest
from stages.models.loading.fingerprint import write_atomically
from stages.models.text.pieces import SPACE, byte_level, sentencepiece
from stages.models.text.tokens import Special, Tokens

CONTROL, USER_DEFINED = 3, 4  # token types; control tokens are skipped in text

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# `pre` word -> (digits are split one by one first, pattern of words)
SPLITS = {
    "default": (False, GPT2),
    "gpt-2": (False, GPT2),
    "smollm": (True, GPT2),
    "starcoder": (True, GPT2),
    "llama-bpe": (False, LLAMA3),
    "llama3": (False, LLAMA3),
    "qwen2": (False, QWEN2),
}


class Vocabulary:
    """The `tokenizer.ggml.*` part of the metadata."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.tokens: list[str] = self("tokens", [])
        if not self.tokens:
            raise OpenError("The GGUF file holds no vocabulary (tokenizer.ggml.tokens).")
        self.types = np.asarray(self("token_type", np.ones(len(self.tokens), np.int32)))

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def id(self, word: str) -> int | None:
        value = self(f"{word}_token_id")
        return int(value) if value is not None and 0 <= value < len(self.tokens) else None

    def text(self, word: str) -> str | None:
        return None if (index := self.id(word)) is None else self.tokens[index]

    @property
    def eos_ids(self) -> frozenset[int]:
        ids = (self.id("eos"), self.id("eot"), self.id("eom"))
        return frozenset(index for index in ids if index is not None)

    @cached_property
    def identity(self) -> str:
        """Of everything that decides ids and text."""
        plain = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in self.metadata.items()
            if key.startswith("tokenizer.")
        }
        return digest(plain)


def gguf_tokens(
    metadata: Mapping[str, Any], template: str | None, memory: Path
) -> tuple[Tokens, Vocabulary]:
    """The tokenizer (`template` overrides the file's own) and the vocabulary it was made of.
    `memory` is the user's cache folder."""
    words = Vocabulary(metadata)
    kind = words("model")
    if kind not in ("gpt2", "llama"):
        raise OpenError(f"GGUF tokenizer '{kind}' is not supported; 'gpt2' and 'llama' are.")
    spm = kind == "llama"
    backend = _sentencepiece(words, memory) if spm else _byte_level(words)
    _add_special(backend, words)
    template = template or metadata.get("tokenizer.chat_template")
    tokens = Tokens(
        backend,
        _special(words, spm),
        sentencepiece if spm else byte_level(),
        template=template,
        identity=digest({"vocabulary": words.identity, "template": template}),
        strip=spm and bool(words("add_space_prefix", True)),
    )
    return tokens, words


def _special(words: Vocabulary, spm: bool) -> Special:
    named = {f"{w}_token": words.text(w) for w in ("bos", "eos", "padding", "unknown")}
    named |= {"pad_token": named.pop("padding_token"), "unk_token": named.pop("unknown_token")}
    add = words("add_bos_token", spm or words("pre") in ("llama-bpe", "llama3"))
    skip = frozenset(np.flatnonzero(words.types == CONTROL).tolist())
    return Special(words.id("bos"), bool(add), skip, {k: v for k, v in named.items() if v})


def _add_special(backend: Any, words: Vocabulary) -> None:
    """Control and user-defined tokens are matched whole, before any splitting."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(words.tokens[i], special=bool(words.types[i] == CONTROL), normalized=False)
            for i in np.flatnonzero((words.types == CONTROL) | (words.types == USER_DEFINED))
        ]
    )


def _byte_level(words: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = words("pre", "default")
    if pre not in SPLITS:
        raise OpenError(f"GGUF pre-tokenizer '{pre}' is not supported; {sorted(SPLITS)} are.")
    digits, pattern = SPLITS[pre]
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    merges = [tuple(line.split(" ", 1)) for line in words("merges", [])]
    vocab = {token: index for index, token in enumerate(words.tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(words: Vocabulary, memory: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pairs = remembered_merges(words, memory / "merges" / f"{words.identity}.npy")
    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(words.tokens)},
        merges=[(words.tokens[left], words.tokens[right]) for left, right in pairs.tolist()],
        unk_token=words.text("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(bpe)
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if words("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    pieces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(pieces)
    return backend


def remembered_merges(words: Vocabulary, note: Path) -> np.ndarray:
    """`merges_from_scores`, from the file `note` where it was written before: for 262k tokens
    it takes two seconds."""
    with contextlib.suppress(OSError, ValueError):
        pairs = np.load(note, allow_pickle=False)
        if pairs.ndim == 2 and pairs.max(initial=0) < len(words.tokens):
            return np.asarray(pairs)
    pairs = merges_from_scores(words.tokens, np.asarray(words("scores")))
    with contextlib.suppress(OSError):
        buffer = io.BytesIO()
        np.save(buffer, pairs, allow_pickle=False)
        write_atomically(note, buffer.getvalue())
    return pairs


def merges_from_scores(tokens: list[str], scores: np.ndarray) -> np.ndarray:
    """Pairs of ids (merges, 2). SentencePiece keeps scores, not merges: every way to cut a piece
    into two known pieces is a merge, ranked by the piece's score, best first; then by the ids."""
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[int, int]] = []
    for index in np.argsort(-scores, kind="stable").tolist():
        token = tokens[index]
        cuts = [
            (ids[left], ids[right])
            for at in range(1, len(token))
            if (left := token[:at]) in ids and (right := token[at:]) in ids
        ]
        merges += sorted(cuts) if len(cuts) > 1 else cuts
    return np.array(merges, np.int32).reshape(-1, 2)
