"""The tokenizer of every real model: a `tokenizers.Tokenizer` with a chat template around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import RequestError
from pipeline.types import Dialect
from stages.models.text.chat_template import ChatTemplate
from stages.models.text.dialect import TemplateDialect
from stages.models.text.pieces import BytesDecoder, PieceBytes, TextDecoder, join

NO_TEMPLATE = (
    "This model has no chat template. Use /v1/completions, or set one in the recipe: "
    "model.template='<Jinja source or file>'."
)


@dataclass(frozen=True)
class Special:
    """Tokens with a meaning. `bos` is put before a text when `add_bos`; ids in `skip` give no
    text; `words` are what templates may name (`bos_token`, `eos_token`, ...)."""

    bos: int | None
    add_bos: bool
    skip: frozenset[int]
    words: Mapping[str, str]


class Tokens:
    """A `Tokenizer`. `pieces` gives a piece's bytes, or is None where the library must decode."""

    def __init__(
        self,
        backend: Any,  # tokenizers.Tokenizer
        special: Special,
        pieces: PieceBytes | None,
        *,
        template: str | None,
        identity: str,
        strip: bool = False,
        parser: str | None = None,  # of mlx_lm.tool_parsers; None: the template tells
    ):
        self._backend, self._special, self._pieces, self._strip = backend, special, pieces, strip
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.template, self.identity, self.special_ids = template, identity, special.skip
        self._chat = ChatTemplate(template, special.words) if template else None
        self.dialect: Dialect = TemplateDialect(self, self._chat, parser)

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json` that other programs read."""
        self._backend.save(str(path))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(well_formed(text), add_special_tokens=False).ids
        bos = self._special.bos
        if add_special and self._special.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def render(
        self, messages: Sequence[Mapping[str, Any]], args: Mapping[str, Any], *, reply: bool = True
    ) -> list[int]:
        if self._chat is None:
            raise no_template()
        return self.encode(self._chat.render(messages, args, reply, self.dialect.native))

    def decode(self, ids: Iterable[int]) -> str:
        return join(self.decoder(), ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for ids beyond the vocabulary (embedding tables are padded)."""
        if (content := self._added.get(token_id)) is not None:
            return content.replace("\u2581", " ").encode("utf-8", "replace")
        piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            return b""
        if self._pieces is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return self._pieces(piece)

    def decoder(self, shown: frozenset[int] = frozenset()) -> BytesDecoder | TextDecoder:
        skip = self._special.skip - shown
        if self._pieces is None:
            return TextDecoder(
                lambda ids: self._decoded(ids, skip) if shown else self._decoded(ids)
            )
        return BytesDecoder(self.token_bytes, skip, self._strip)

    def _decoded(self, ids: list[int], skip: frozenset[int] | None = None) -> str:
        if skip is None:
            return str(self._backend.decode(ids))
        kept = [i for i in ids if i not in skip]
        return str(self._backend.decode(kept, skip_special_tokens=False))


def no_template() -> RequestError:
    return RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")


def well_formed(text: str) -> str:
    """Halves of surrogate pairs joined where they meet, else replaced: UTF-8 cannot hold them."""
    if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
