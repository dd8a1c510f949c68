"""Chat templates: model files bring them as Jinja source, so they run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError, RequestError
from pipeline.types.places import user_path
from stages.models.text.tool_prompt import speaks_of_tools, with_tools

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A compiled template with the environment that published templates expect: trimmed blocks,
    loop controls, `raise_exception`, `strftime_now` and a plain `tojson`. Safe on any thread."""

    def __init__(self, source: str, words: Mapping[str, str]):
        from jinja2 import TemplateError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self.source, self.words = source, dict(words)
        try:
            plain = _without_marks(source)
            self._template = environment.from_string(plain)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(plain)))
        except TemplateError as error:
            raise OpenError(f"The chat template is no valid Jinja: {error}") from error

    def render(
        self, messages: Messages, args: Mapping[str, Any], reply: bool, knows_tools: bool = True
    ) -> str:
        """RequestError with the template's own words where it refuses these messages. One that does not
        know tools gets them, calls and results as text."""
        tools = args.get("tools") or ()
        if knows_tools or not (tools or speaks_of_tools(messages)):
            return self._filled(messages, args, reply)
        args = {**args, "tools": None}
        try:
            return self._filled(with_tools(messages, tools, system=True), args, reply)
        except RequestError:  # some take no system message
            return self._filled(with_tools(messages, tools, system=False), args, reply)

    def _filled(self, messages: Messages, args: Mapping[str, Any], reply: bool) -> str:
        values = self.words | {"tools": None, "documents": None} | dict(args)
        try:
            return self._template.render(
                **values, messages=[dict(m) for m in messages], add_generation_prompt=reply
            )
        except _Refused as refusal:
            raise RequestError(
                f"The chat template refuses these messages: {refusal}", param="messages"
            ) from refusal
        except Exception as error:  # whatever a template from elsewhere may do
            raise RequestError(
                f"The chat template cannot render these messages: {error}", param="messages"
            ) from error


class _Refused(Exception):
    """What `raise_exception` of a template raises."""


def _refuse(message: str) -> str:
    raise _Refused(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **how: Any) -> str:
    """Jinja's own filter escapes HTML and sorts keys; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _without_marks(source: str) -> str:
    """Drop `{% generation %}` marks (they matter to training only; Jinja does not know them)."""
    import re

    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)


def template_file(setting: str | None) -> Path | None:
    """The file that a recipe's `template` names; None where it is Jinja source itself, or not set."""
    if setting is None or "{{" in setting or "{%" in setting:
        return None
    return user_path(setting)


def template_source(setting: str) -> str:
    """A recipe's `template`: Jinja source, or the path of a file that holds it."""
    if (path := template_file(setting)) is None:
        return setting
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OpenError(
            f"template={setting} is neither Jinja source nor a readable file: {error}"
        ) from error
