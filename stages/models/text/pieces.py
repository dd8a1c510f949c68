"""The bytes of a token, and text from tokens whose bytes are known.

Decoding works on bytes, not on the `tokenizers` library's strings: joined bytes decoded as UTF-8
are the same however a stream is cut, and an invalid byte costs one replacement mark instead of
spoiling the valid characters beside it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # SentencePiece writes a space as this block

PieceBytes = Callable[[str], bytes]


def byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: the printable letter that stands for each byte.
    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2, described there."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_level() -> PieceBytes:
    """Pieces written in GPT-2's alphabet; a piece with any other letter stands for itself."""
    letters = byte_letters()

    def piece_bytes(piece: str) -> bytes:
        try:
            return bytes([letters[letter] for letter in piece])
        except KeyError:
            return piece.encode("utf-8", "replace")

    return piece_bytes


def sentencepiece(piece: str) -> bytes:
    """`<0x0A>` is one byte; otherwise the text with blocks for spaces."""
    if match := BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE, " ").encode("utf-8", "replace")


class BytesDecoder:
    """A `StreamDecoder` over token bytes. `strip`: the tokenizer writes a space before the first
    word, and the text must begin without it."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skip: frozenset[int], strip: bool = False
    ):
        self._bytes, self._skip, self._strip = token_bytes, skip, strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._begin(self._utf8.decode(self._bytes(token_id)))

    def flush(self) -> str:
        return self._begin(self._utf8.decode(b"", True))

    def _begin(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class TextDecoder:
    """A `StreamDecoder` for tokenizers whose decoder is more than joining bytes: decodes all ids
    again at each token and gives what is new once it can no longer change. Quadratic, and rare."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode, self._ids, self._given = decode, list[int](), ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._new(self._decode(self._ids).rstrip("\ufffd"))

    def flush(self) -> str:
        return self._new(self._decode(self._ids))

    def _new(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""
        piece, self._given = text[len(self._given) :], text
        return piece


def join(decoder: BytesDecoder | TextDecoder, ids: Iterable[int]) -> str:
    """All ids through one decoder."""
    return "".join([*map(decoder.push, ids), decoder.flush()])
