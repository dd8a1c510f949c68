"""The real engine on recipe `fake` behind the real server, driven by the official client."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import openai
import pytest

import pipeline
from pipeline.engine import Engine
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

CONTEXT = 400
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 5}
OVERRIDES = ("model.context=400", "model.layers=1", "model.delay_ms=2", "limits.max_rows=4")


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Engine, str]]:
    with (
        pipeline.load("fake", *OVERRIDES) as engine,
        serve_in_thread(engine, ServerSettings(keepalive_s=0.5)) as base,
    ):
        yield engine, base


@pytest.fixture
def client(real: tuple[Engine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real[1] + "/v1", api_key="none", max_retries=0) as client:
        yield client


def said(client: openai.OpenAI, **more: Any) -> str:
    chunks = client.chat.completions.create(**{**ASK, **more}, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def prompts(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": word}]


def test_stream_equals_whole_equals_generate(real, client):
    reply = client.chat.completions.create(**ASK, max_tokens=30)
    text = reply.choices[0].message.content
    assert len(text) == 30
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 30
    assert said(client, max_tokens=30) == text
    assert real[0].generate("hi", max_tokens=30, seed=5)["text"] == text


def test_the_second_request_reports_cached_tokens(client):
    messages = prompts("a longer prompt " * 8)
    first = client.chat.completions.create(**{**ASK, "messages": messages}, max_tokens=2)
    second = client.chat.completions.create(**{**ASK, "messages": messages}, max_tokens=2)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 50
    assert second.choices[0].message.content == first.choices[0].message.content


def test_a_stop_string_never_leaks(client):
    text = said(client, max_tokens=30)
    assert said(client, max_tokens=30, stop=text[10:13]) == text[:10]
    reply = client.chat.completions.create(**ASK, max_tokens=30, stop=[text[20:22], text[10:13]])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (text[:10], "stop")


def test_logprobs_match_the_answer(client):
    reply = client.chat.completions.create(**ASK, max_tokens=12, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    text = reply.choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in entries)
    old = client.completions.create(model="m", prompt="ab", max_tokens=6, logprobs=2, seed=1)
    form = old.choices[0].logprobs
    assert "".join(form.tokens) == old.choices[0].text
    assert form.text_offset == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_over_the_context(client, stream, chat):
    text: Any = "x" * CONTEXT
    ask: dict[str, Any] = {"messages": prompts(text)} if chat else {"prompt": text}
    create = client.chat.completions.create if chat else client.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="m", stream=stream, **ask)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if chat else "prompt")
    assert str(CONTEXT) in caught.value.message


def test_max_tokens_is_clamped_to_the_room(client):
    reply = client.completions.create(model="m", prompt="x" * (CONTEXT - 3), max_tokens=2**40)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 3)
    empty = client.completions.create(model="m", prompt="x", max_tokens=0)
    assert (empty.choices[0].text, empty.choices[0].finish_reason) == ("", "length")
    assert empty.usage.completion_tokens == 0


def test_every_client_gets_what_it_gets_alone(client):
    asks = [{"messages": prompts(f"number {i}"), "max_tokens": 10 + i} for i in range(8)]
    alone = [said(client, **ask) for ask in asks]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda ask: said(client, **ask), asks * 2)) == alone * 2


@pytest.mark.parametrize("read", [0, 1, 600])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(real, client, script, read, stream):
    engine, base = real
    body = json.dumps({**ASK, "stream": stream}).encode()
    host, port = urlsplit(base).netloc.split(":")
    alone = said(client, max_tokens=40)
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        script.eventually(lambda: engine.stats()["rows"]["active"] == 1)
        got = 0
        while stream and got < read:
            got += len(sock.recv(4096))
    assert said(client, max_tokens=40) == alone
    script.eventually(lambda: engine.stats()["rows"]["open_requests"] == 0)


def test_clients_that_leave_the_queue(real, client, script):
    engine, base = real
    address = urlsplit(base).netloc.split(":")
    body = json.dumps(ASK).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection((address[0], int(address[1]))) for _ in range(8)]
    for sock in sockets:
        sock.sendall(head.encode() + body)
    script.eventually(lambda: engine.stats()["rows"]["waiting"] == 4)
    for sock in reversed(sockets):
        sock.close()
    assert len(said(client, max_tokens=5)) == 5
    script.eventually(lambda: engine.stats()["rows"]["open_requests"] == 0)


def test_bad_input_leaves_running_answers_alone(real, client, script):
    alone = said(client, max_tokens=60)
    raw = script.Raw(real[1])
    bad: list[Any] = [b"{", {"messages": []}, {**ASK, "temperature": -1}, {**ASK, "stop": ""}]
    bad += [{"messages": prompts("\ud800\0")}, {"messages": prompts("x" * 900)}]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(said, client, max_tokens=60)
        statuses = [raw.post("/v1/chat/completions", body)[0] for body in bad]
        assert running.result() == alone
    assert statuses == [400, 400, 400, 400, 200, 400]


def test_status_of_a_real_engine(real, script):
    raw = script.Raw(real[1])
    health = json.loads(raw.call("GET", "/health")[2])
    assert health["status"] == "ok"
    assert "blas" in health["device"]
    stats = json.loads(raw.call("GET", "/stats")[2])
    assert stats["rows"]["max"] == 4
    assert b"headrace_engine_rows_waiting" in raw.call("GET", "/metrics")[2]


def test_a_base_model_has_no_chats_but_completions(script):
    with (
        pipeline.load("fake", "model.template=null") as engine,
        serve_in_thread(engine, ServerSettings()) as base,
    ):
        raw = script.Raw(base)
        status, _, reply = raw.post("/v1/chat/completions", {**ASK, "stream": True})
        assert (status, reply["error"]["code"]) == (400, "no_chat_template")
        assert raw.post("/v1/completions", {"prompt": "ab", "max_tokens": 1})[0] == 200


def test_a_full_queue_says_when_to_come_back(script):
    few = ("limits.max_rows=1", "limits.max_queue=1", "model.delay_ms=5")
    with (
        pipeline.load("fake", *few) as engine,
        serve_in_thread(engine, ServerSettings()) as base,
        ThreadPoolExecutor(2) as pool,
    ):
        raw = script.Raw(base)
        ask = {**ASK, "max_tokens": 60}
        running = [pool.submit(raw.post, "/v1/chat/completions", ask) for _ in range(2)]
        script.eventually(lambda: engine.stats()["rows"]["open_requests"] == 2)
        status, headers, reply = raw.post("/v1/chat/completions", ask)
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) >= 1
        assert [each.result()[0] for each in running] == [200, 200]


def test_a_stopped_engine_is_not_ready(script):
    with pipeline.load("fake") as engine, serve_in_thread(engine, ServerSettings()) as base:
        raw = script.Raw(base)
        assert raw.call("GET", "/ready")[0] == 200
        engine.close()
        assert raw.call("GET", "/ready")[0] == 503
        assert raw.call("GET", "/health")[0] == 503
        assert raw.post("/v1/chat/completions", ASK)[0] == 503
        assert raw.call("GET", "/metrics")[0] == 200
        assert raw.call("GET", "/stats")[0] == 200


def test_stats_say_what_the_kv_policy_covers_and_keep_estimate_and_limit_apart(real):
    with urlopen(real[1] + "/stats") as reply:
        stats = json.load(reply)
    assert stats["kv"] == {
        "policy": {"kv": "native"}, "layers": 1, "covered": 1, "kept": {}, "bytes_per_token": 8
    }  # fmt: skip
    assert stats["memory"]["enforced"] == {}
    assert set(stats["memory"]["estimate"]) >= {"weights_bytes", "rows_bytes"}


def test_a_priority_that_changes_nothing_is_said_to_be_ignored(client):
    for priority, said in ((3, '299 headrace "ignored: priority"'), (0, None)):
        reply = client.chat.completions.with_raw_response.create(
            **ASK, max_tokens=1, extra_body={"priority": priority}
        )
        assert reply.headers.get("warning") == said
    with pipeline.load("fake", "scheduler=fair") as fair:
        assert fair.target_info["priorities"]


def test_a_prompt_is_scored_whatever_is_saved_of_it(client):
    prompt = list(range(40, 90))
    client.completions.create(model="m", prompt=prompt, max_tokens=1)
    body = {"prompt_logprobs": 2}
    reply = client.completions.create(model="m", prompt=prompt, max_tokens=0, extra_body=body)
    first, *rest = reply.choices[0].prompt_logprobs
    own = [entry[str(token)] for token, entry in zip(prompt[1:], rest, strict=True)]
    assert first is None and all(entry["rank"] >= 1 for entry in own)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (50, 0)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_echo_puts_the_prompt_before_the_answer(client):
    ask: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4, "seed": 1}
    alone = client.completions.create(**ask, logprobs=1).choices[0]
    for prompt in ("hello", list(b"hello")):
        reply = client.completions.create(**{**ask, "prompt": prompt}, echo=True, logprobs=1, n=2)
        first, second = reply.choices
        assert first.text == "hello" + alone.text
        form = first.logprobs
        assert "".join(form.tokens) == first.text
        assert form.text_offset == list(range(9))
        assert form.token_logprobs[0] is None and form.top_logprobs[0] is None
        assert form.token_logprobs[5:] == alone.logprobs.token_logprobs
        assert second.logprobs.token_logprobs[:5] == form.token_logprobs[:5]
        assert reply.usage.prompt_tokens == 5
    scored = client.completions.create(**{**ask, "max_tokens": 0}, echo=True, logprobs=0)
    assert scored.choices[0].text == "hello"
    assert len([p for p in scored.choices[0].logprobs.token_logprobs if p is not None]) == 4
    chunks = client.completions.create(**ask, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello" + alone.text


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_scored_prompt_is_streamed_before_the_answer(client, tokens):
    ask: dict[str, Any] = {
        "model": "m",
        "max_tokens": tokens,
        "seed": 1,
        "echo": True,
        "logprobs": 1,
    }
    prompts = ["hello", "hm"]
    whole = client.completions.create(**ask, prompt=prompts)
    texts, forms = ["", ""], [{"tokens": [], "token_logprobs": [], "text_offset": []} for _ in "ab"]
    for chunk in client.completions.create(**ask, prompt=prompts, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        for name, values in forms[choice.index].items():
            values += getattr(choice.logprobs, name) if choice.logprobs else []
    for choice, text, form in zip(whole.choices, texts, forms, strict=True):
        assert text == choice.text
        assert form == {name: getattr(choice.logprobs, name) for name in form}
        assert len(form["tokens"]) == len(prompts[choice.index]) + tokens


def test_tokens_without_an_answer(real, script):
    raw = script.Raw(real[1])
    reply = raw.post("/tokenize", {"prompt": "hé", "return_token_strs": True})[2]
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (
        [104, 195, 169],
        3,
        CONTEXT,
    )
    assert raw.post("/detokenize", {"tokens": reply["tokens"]})[2]["prompt"] == "hé"
    assert raw.post("/tokenize", {"content": "h"})[2]["tokens"] == [104]
    chat = raw.post("/tokenize", {"messages": prompts("hi"), "add_generation_prompt": False})[2]
    assert bytes(chat["tokens"]) == b"user: hi\n"
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ):
        status, _, reply = raw.post(path, body)
        assert (status, reply["error"]["param"]) == (400, param)
