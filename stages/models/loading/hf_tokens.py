"""A tokenizer from a Hugging Face layout folder.

`tokenizer.json` is read with the `tokenizers` library; a folder that has only an older form
(`tokenizer.model`, vocabulary files) is converted by transformers first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError, nearest
from pipeline.identity import digest, file_digest
from stages.models.text.pieces import PieceBytes, byte_level, sentencepiece
from stages.models.text.tokens import Special, Tokens

ROLES = ("bos", "eos", "unk", "pad")
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip


def hf_tokens(folder: Path, template: str | None) -> tuple[Tokens, frozenset[int], str]:
    """The tokenizer, its own EOS ids, and where the chat template came from."""
    config = read_json(folder / "tokenizer_config.json")
    backend = _backend(folder)
    special = _special(backend, read_json(folder / "special_tokens_map.json") | config)
    source, origin = chat_template(folder, config, template)
    pieces, strip = _pieces(json.loads(backend.to_str())["decoder"])
    tokens = Tokens(
        backend,
        special,
        pieces,
        template=source,
        identity=_identity(folder, source),
        strip=strip,
        parser=config.get("tool_parser_type"),
    )
    eos = backend.token_to_id(special.words.get("eos_token", ""))
    return tokens, frozenset() if eos is None else frozenset({eos}), origin


def read_json(path: Path) -> dict[str, Any]:
    """Empty where the file is absent; OpenError where it is no JSON object."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OpenError(f"{path} is no valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _backend(folder: Path) -> Any:
    from tokenizers import Tokenizer

    if (file := folder / "tokenizer.json").exists():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise OpenError(f"{file} cannot be read: {error}") from error
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return slow.backend_tokenizer
    except Exception as error:
        raise OpenError(
            f"{folder} has no tokenizer.json, and what it has cannot be read: {error}"
        ) from error


def _special(backend: Any, config: Mapping[str, Any]) -> Special:
    """BOS is added where `add_bos_token` says so, else where the post-processor does."""
    words = {
        f"{role}_token": text for role in ROLES if (text := _text(config.get(f"{role}_token")))
    }
    bos = backend.token_to_id(words.get("bos_token", ""))
    add = config.get("add_bos_token")
    if add is None:
        add = bos is not None and backend.encode("a").ids[:1] == [bos]
    added = backend.get_added_tokens_decoder()
    skip = frozenset(index for index, token in added.items() if token.special)
    return Special(bos, bool(add), skip, words)


def _text(token: Any) -> str | None:
    """Tokens are written as a string or as a mapping with `content`."""
    return token.get("content") if isinstance(token, Mapping) else token


def _pieces(decoder: Mapping[str, Any] | None) -> tuple[PieceBytes | None, bool]:
    """How pieces become bytes, and whether the text's first space is stripped. None: only the
    library knows."""
    steps = (decoder or {}).get("decoders", [decoder or {"type": "none"}])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level(), False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        return sentencepiece, len(kinds) == 4
    return None, False


def chat_template(
    folder: Path, config: Mapping[str, Any], setting: str | None
) -> tuple[str | None, str]:
    """Source and a word on its origin. A setting is source, a name among several, or a file."""
    from stages.models.text.chat_template import template_source

    named = _named(folder, config)
    if setting is None:
        return named.get("default"), "the model folder" if "default" in named else "none"
    if setting in named:
        return named[setting], f"the model folder ('{setting}')"
    try:
        return template_source(setting), "the recipe"
    except OpenError as error:
        if not named:
            raise
        known = f"The folder's templates are {sorted(named)}. {nearest(setting, named)}"
        raise OpenError(f"{error} {known}") from error


def _named(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """All templates by name; a file of its own wins over the tokenizer configuration."""
    value = config.get("chat_template")
    if isinstance(value, list):
        templates = {item["name"]: item["template"] for item in value}
    else:
        templates = {"default": value} if value else {}
    if isinstance(value := read_json(folder / "chat_template.json").get("chat_template"), str):
        templates["default"] = value
    for file in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").exists():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _identity(folder: Path, template: str | None) -> str:
    files = {name: file_digest(folder / name) for name in FILES if (folder / name).exists()}
    return digest({"files": files, "template": template})
