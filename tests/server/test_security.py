"""What no request can do: read a file, open a connection, run code, or take more time than its size is worth."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import pipeline
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
BAIT = "/etc/headrace-bait"
URL = "http://headrace-bait.invalid:1/x"
HI = [{"role": "user", "content": "hi"}]
SMALL = ("constraint=llguidance", "model.context=600", "limits.max_tokens=4")
BOUND_S = 20.0  # of wall time on a busy machine; a bomb that goes off takes minutes


ALWAYS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "socket.getaddrinfo", "pickle.find_class"}
)
BAITED = frozenset({"open", "import", "socket.connect", "compile"})


class Watch:
    """What Python's own audit events say that the server does: not the client, which is this thread."""

    def __init__(self) -> None:
        self.on, self.seen = False, []
        self._client = threading.get_ident()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or threading.get_ident() == self._client:
            return
        if event in ALWAYS or (event in BAITED and "bait" in str(arguments)):
            self.seen.append((event, str(arguments)))


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def base(watch) -> Iterator[str]:
    with (
        pipeline.load("fake", *SMALL) as engine,
        serve_in_thread(engine, ServerSettings(responses_ttl_s=60)) as base,
    ):
        yield base


@pytest.fixture
def ask(base, script, watch):
    """Status and reply of a body, with nothing suspicious done for it."""

    def post(path: str, body: Any) -> tuple[int, Any]:
        began = time.monotonic()
        watch.on, watch.seen[:] = True, []
        try:
            status, _, reply = script.Raw(base).post(path, body)
        finally:
            watch.on = False
        assert watch.seen == []
        assert time.monotonic() - began < BOUND_S
        assert status < 500, reply
        return status, reply

    return post


def content(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]


PARTS = [
    (CHAT, "messages", {"type": "image_url", "image_url": {"url": URL}}),
    (CHAT, "messages", {"type": "image_url", "image_url": {"url": f"file://{BAIT}"}}),
    (CHAT, "messages", {"type": "input_audio", "input_audio": {"data": BAIT, "format": "wav"}}),
    (CHAT, "messages", {"type": "file", "file": {"file_id": "../../etc/headrace-bait"}}),
    (MESSAGES, "messages", {"type": "image", "source": {"type": "url", "url": URL}}),
    (MESSAGES, "messages", {"type": "document", "source": {"type": "file", "file_id": BAIT}}),
    (RESPONSES, "input", {"type": "input_image", "image_url": URL}),
    (RESPONSES, "input", {"type": "input_file", "file_id": BAIT}),
    (RESPONSES, "input", {"type": "input_file", "file_url": URL}),
]


@pytest.mark.parametrize(("path", "field", "part"), PARTS, ids=lambda value: str(value)[:40])
def test_images_and_files_are_refused_by_name(ask, path, field, part):
    status, reply = ask(path, {"model": "m", "max_tokens": 2, field: content(part)})
    assert status == 400
    assert f"{field}[0].content[1]" in reply["error"]["message"]
    assert "bait" not in str(reply)


FIELDS: list[tuple[str, Any]] = [
    ("model", f"../../{BAIT}"),
    ("model", URL),
    ("user", f"../{BAIT}\r\nx: y"),
    ("session_id", f"../../../{BAIT}"),
    ("adapter", f"../{BAIT}"),
    ("draft_model", BAIT),
    ("chat_template", "{% include '/etc/headrace-bait' %}"),
    ("chat_template_kwargs", {"a": {"_target_": "os.system", "_args_": ["touch bait"]}}),
    ("logits_processors", ["headrace_bait.module:f"]),
    ("guided_json", {"$ref": f"file://{BAIT}"}),
    ("guided_json", {"$ref": URL}),
    ("guided_json", {"type": "object", "properties": {"a": {"$ref": "../../etc/headrace-bait#/x"}}}),
    ("guided_grammar", f"start: A\n%import {BAIT}.A"),
    ("guided_grammar", "start: a\n%import headrace_bait.a"),
    ("grammar", 'root ::= "a"\n#include "/etc/headrace-bait"'),
    ("messages", [{"role": "user", "content": "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include 'bait' %}"}]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: str(value)[:40])
def test_no_field_opens_or_runs_anything(ask, field, value):
    """400, or the text is only text."""
    status, reply = ask(CHAT, {"messages": HI, "max_tokens": 2, field: value})
    assert status in (200, 400)
    assert "Traceback" not in str(reply)


def test_text_is_not_a_template(ask, base, script):
    text = "{{ 7 * 7 }} {% raw %}"
    _, tokens = ask("/tokenize", {"messages": [{"role": "user", "content": text}]})
    _, back = ask("/detokenize", {"tokens": tokens["tokens"]})
    assert text in back["prompt"]


@pytest.mark.parametrize(
    "name",
    ["../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "....//etc/passwd", "/etc/passwd",
     "resp_" + "0" * 32 + "%2f..%2f..%2fx", "resp_" + "0" * 32 + "%00.json", "C:%5Cwindows", "%c0%ae%c0%ae/", "~root"],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/v1/responses/{}", "/v1/models/{}", "/{}", "/v1/responses/{}/input_items"]
)
def test_names_are_no_paths(base, script, watch, path, name):
    watch.on, watch.seen[:] = True, []
    try:
        for method in ("GET", "DELETE"):
            status, _, reply = script.Raw(base).call(method, path.format(name))
            assert status in (404, 405)
            assert b"root:" not in reply
    finally:
        watch.on = False
    assert watch.seen == []


def nested(depth: int, word: str) -> str:
    return "{" + f'"{word}":{{' * depth + "}" * depth + "}"


BOMBS: list[tuple[str, Any]] = [
    ("guided_regex", "(a+)+" * 20 + "$"),
    ("guided_regex", "(" * 2000 + "a" + ")" * 2000),
    ("guided_regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("guided_regex", "a{1000000000}"),
    ("guided_regex", "(x|xx|xxx)" * 3000),
    ("guided_regex", r"\p{L}{500}" * 40),
    ("guided_json", {"type": "string", "pattern": "^((a|b){1,500}){1,500}$"}),
    ("guided_json", {"type": "string", "minLength": 10**9, "maxLength": 10**9}),
    ("guided_json", {"type": "array", "minItems": 10**7, "maxItems": 10**7}),
    ("guided_json", {"anyOf": [{"const": "x" * n} for n in range(500)]}),
    ("guided_json", {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 20}}, "$ref": "#/$defs/a"}),
    ("guided_json", {"properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}),
    ("guided_json", {"multipleOf": 1e-300, "type": "number"}),
    ("guided_choice", ["x" * 100 + str(n) for n in range(5000)]),
    ("guided_grammar", "start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(200)) + "\na200: /x/"),
    ("grammar", "root ::= root root | root root root | \"a\""),
    ("stop", ["a" * 1024] * 16),
    ("chat_template_kwargs", {"enable_thinking": "x" * 100_000}),
    ("chat_template_kwargs", json.loads(nested(90, "k"))),
    ("logit_bias", {str(n): 1 for n in range(250)}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BOMBS, ids=lambda value: str(value)[:40])
def test_bombs_go_off_in_bounded_time(ask, field, value):
    status, reply = ask(CHAT, {"messages": HI, "max_tokens": 2, field: value})
    assert status in (200, 400), reply
    assert ask(CHAT, {"messages": HI, "max_tokens": 1})[0] == 200, "and the server goes on"


@pytest.mark.parametrize(
    "body",
    [b"[" * 1_000_000, b'{"a":' * 200_000, b"{" + b'"a":1,' * 300_000 + b'"a":1}', b"1" * 1_000_000,
     b'{"messages": ' + b"9" * 100_000 + b"}", b'{"a": "' + b"\\ud800" * 200_000 + b'"}', b"\x00" * 100_000,
     b'{"seed": 1' + b"0" * 4000 + b"}", json.dumps({"a": json.loads(nested(150, "b"))}).encode(),
     b'{"messages": [' + b"{}," * 300_000 + b"{}]}",
     b'{"' + b"k" * 2_000_000 + b'\\ud800": [' + b"1," * 300_000 + b"1]}"],
)  # fmt: skip
def test_bodies_that_are_bombs(ask, body):
    status, reply = ask(CHAT, body)
    assert status == 400
    assert len(json.dumps(reply)) < 2000


@pytest.mark.parametrize(
    "header",
    ["x-forwarded-for", "x-real-ip", "forwarded", "x-original-url", "x-http-method-override"],
)
def test_headers_that_proxies_believe_are_not_believed(base, script, header):
    for value in ("127.0.0.1", "/admin/drain", "DELETE", "for=127.0.0.1", "a, b"):
        assert script.Raw(base).call("POST", "/admin/drain", **{header: value})[0] == 403
        assert script.Raw(base).call("GET", "/health", **{header: value})[0] == 200
