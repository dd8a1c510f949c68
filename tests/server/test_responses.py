"""The responses API by the official client: items, events, and going on from stored answers."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.server.logprobs import ChatLogprobs, ShownLogprobs
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.server.store import ResponseStore
from pipeline.types import Accepted, Delta, Failed, TokenLogprob
from stages.models.fake import ByteTokens

PATH = "/v1/responses"
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TWO = f"<think>\nhm\n</think>\n\nok\n{ONE}"


def test_whole(engine, client, script):
    reply = client.responses.create(model="m", input="hi", instructions="be brief")
    assert reply.output_text == script.TEXT
    assert (reply.status, reply.model, reply.object) == ("completed", "fake/one", "response")
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 8, 13)
    assert usage.input_tokens_details.cached_tokens == 3
    assert engine.requests[0].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    )


def test_items_become_a_chat(engine, client):
    client.responses.create(
        model="m",
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.4,
        user="bob",
        tools=[ADD],
        reasoning={"effort": "none"},
    )  # fmt: skip
    (request,) = engine.requests
    function = {"name": "add", "arguments": {"a": 1}}
    assert request.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2", "name": "add"},
    )
    assert (request.max_tokens, request.sampling.temperature, request.client) == (9, 0.5, "bob")
    assert request.template_args["enable_thinking"] is False
    assert request.template_args["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_streamed_equals_whole(engine, client, script, size):
    engine.plan = script.saying(TWO, size)
    whole = client.responses.create(model="m", input="hi", tools=[ADD])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[2].arguments == '{"a": 1, "b": 2}'
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>")
    with client.responses.stream(model="m", input="hi", tools=[ADD]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == whole.output[2].arguments

    def plain(response: Any) -> list[dict[str, Any]]:
        drop = ("id", "call_id", "parsed_arguments")
        return [{k: v for k, v in i.to_dict().items() if k not in drop} for i in response.output]

    assert final.status == "completed"
    assert [item["type"] for item in plain(final)] == [item["type"] for item in plain(whole)]
    assert plain(final)[0] == plain(whole)[0]
    assert plain(final)[2] == plain(whole)[2]


def test_a_stream_byte_by_byte(engine, raw, script):
    engine.plan = script.saying(TWO, 1000)
    lines = raw.events(PATH, {"input": "hi", "tools": [ADD], "stream": True})
    names = [line.removeprefix("event: ").removeprefix("response.") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done"]
    text += ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert names == [
        "created",
        "in_progress",
        *[name.format("reasoning_text") for name in text],
        *[name.format("output_text") for name in text],
        *call,
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    assert [event.get("output_index") for event in data[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4
    assert data[2]["item"]["content"] == []
    assert data[4]["delta"] == "hm"
    assert data[12]["part"] == {
        "type": "output_text", "text": "ok", "annotations": [], "logprobs": []
    }  # fmt: skip
    assert data[-1]["response"]["output"][1] == data[13]["item"]
    assert data[0]["response"]["output"] == []


def test_going_on_from_an_answer(engine, client, script):
    engine.plan = script.saying(TWO)
    first = client.responses.create(model="m", input="hi", tools=[ADD], instructions="be brief")
    call = first.output[2]
    engine.plan = script.greeting
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    second = client.responses.create(model="m", previous_response_id=first.id, input=[output])
    messages = engine.requests[-1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]  # no instructions
    assert messages[1]["tool_calls"][0]["id"] == call.call_id
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[2]["name"] == "add"
    client.responses.create(model="m", previous_response_id=second.id, input="and?")
    assert [m["role"] for m in engine.requests[-1].messages][-2:] == ["assistant", "user"]

    assert client.responses.retrieve(first.id).output == first.output
    items = client.responses.input_items.list(second.id).data
    assert [item.type for item in items] == ["function_call_output"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="m", input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(engine, client):
    reply = client.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_structured_output_is_parsed(engine, client, script):
    class Place(BaseModel):
        name: str

    engine.plan = script.saying('{"name": "Paris"}')
    reply = client.responses.parse(model="m", input="hi", text_format=Place)
    assert reply.output_parsed == Place(name="Paris")
    assert engine.requests[0].grammar.field == "text.format"


def test_an_answer_cut_by_its_limit(engine, client):
    reply = client.responses.create(model="m", input="hi", max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"


def test_a_failure_in_the_stream(engine, raw):
    engine.plan = lambda _: [Accepted(1), Delta("a", (1,)), 0.3, Failed(RuntimeError("secret"))]
    lines = raw.events(PATH, {"input": "hi", "stream": True})
    assert [line for line in lines if line.startswith("event")][-2:] == [
        "event: error",
        "event: response.failed",
    ]
    assert "secret" not in "".join(lines)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "f"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_a_400_naming_it(engine, raw, fields, param):
    status, _, reply = raw.post(PATH, {"input": "hi", **fields})
    assert (status, reply["error"]["param"]) == (400, param)
    assert not engine.requests


NAMES = [f"resp_{i:032x}" for i in range(9)]


def test_the_store_has_a_bound_and_forgets():
    store = ResponseStore(ttl_s=60, max_bytes=100)
    for name in NAMES[:4]:
        store.put("", name, {"text": "x" * 20})
    assert [store.get("", name) is not None for name in NAMES[:4]] == [False, True, True, True]
    store.get("", NAMES[1])
    store.put("", NAMES[4], {"text": "x" * 20})
    assert [store.get("", name) is not None for name in NAMES[1:4]] == [True, False, True]
    store.put("", NAMES[5], {"text": "x" * 200})
    assert store.get("", NAMES[5]) is None
    short = ResponseStore(ttl_s=0.01, max_bytes=100)
    short.put("", NAMES[0], {})
    time.sleep(0.02)
    assert short.get("", NAMES[0]) is None


def test_no_owner_drives_out_those_who_hold_less():
    store, one = ResponseStore(ttl_s=60, max_bytes=100), {"a": "x" * 12}  # 20 bytes
    names = [f"resp_{i:032x}" for i in range(30)]
    store.put("bob", names[0], one)
    store.put("eve", names[1], {"a": "x" * 32})  # 40 bytes
    for name in names[2:]:
        store.put("alice", name, one)
    assert store.get("bob", names[0]) and store.get("eve", names[1])
    kept = [name for name in names if store.get("alice", name)]
    assert kept == names[-2:], "the longest unused of her own"
    store.put("bob", names[2], {"a": "x" * 52})
    assert not store.get("bob", names[2]), "then he would hold most"
    assert store.get("eve", names[1]) and store.get("alice", names[-1])


def test_a_folder_outlives_the_store(tmp_path):
    folder = str(tmp_path / "answers")
    ResponseStore(ttl_s=60, max_bytes=100, folder=folder).put("", NAMES[0], {"a": 1})
    (tmp_path / "answers" / f"{NAMES[1]}.new").write_text("{")
    (tmp_path / "answers" / f"{NAMES[2]}.json").write_text("{")
    (tmp_path / "secret.json").write_text('{"a": 2}')
    again = ResponseStore(ttl_s=60, max_bytes=100, folder=folder)
    assert again.get("", NAMES[0]) == {"a": 1}
    assert again.get("", NAMES[2]) is None  # damaged
    assert again.get("", "../secret") is None
    assert sorted(file.name for file in (tmp_path / "answers").iterdir())[0] == f"{NAMES[0]}.json"
    assert again.delete("", NAMES[0]) and not again.delete("", NAMES[0])


def test_folders_that_do_not_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="responses_folder"):
        ServerSettings(responses_folder=str(tmp_path / "file")).store()
    store = ResponseStore(ttl_s=60, max_bytes=100, folder=str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    store.put("", NAMES[0], {})
    assert store.get("", NAMES[0]) is None


def test_a_restarted_server_goes_on(script, tmp_path):
    engine = script.Engine()
    settings = ServerSettings(responses_folder=str(tmp_path))
    names = []
    for before in (None, 0):
        with (
            serve_in_thread(engine, settings) as base,
            openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client,
        ):
            previous = None if before is None else names[before]
            reply = client.responses.create(model="m", input="hi", previous_response_id=previous)
            names.append(reply.id)
    assert [m["role"] for m in engine.requests[-1].messages] == ["user", "assistant", "user"]


def test_log_probabilities_of_the_text(engine, client, script):
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(model="m", input="hi", **wanted)
    (part,) = whole.output[0].content
    assert b"".join(bytes(e.bytes) for e in part.logprobs).decode() == script.TEXT
    assert {len(e.top_logprobs) for e in part.logprobs} == {2}
    assert whole.top_logprobs == 2
    events = list(client.responses.create(model="m", input="hi", **wanted, stream=True))
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    (done,) = [e.logprobs for e in events if e.type == "response.output_text.done"]
    expected = [(e.token, e.logprob) for e in part.logprobs]
    assert [(e.token, e.logprob) for entries in deltas for e in entries] == expected
    assert [(e.token, e.logprob) for e in done] == expected
    final = events[-1].response.output[0].content[0]
    assert final.logprobs == part.logprobs


def test_no_log_probabilities_unless_asked_for(engine, raw):
    reply = raw.post(PATH, {"input": "hi"})[2]
    assert reply["output"][0]["content"][0]["logprobs"] == []
    assert engine.requests[0].logprobs is None
    status, _, reply = raw.post(PATH, {"input": "hi", "top_logprobs": 2})
    assert (status, reply["error"]["param"]) == (400, "top_logprobs")


def test_log_probabilities_of_what_is_no_text_are_left_out():
    """Of reasoning, marks, blanks and calls, however many pieces show them."""
    tokens = ByteTokens(None)
    for thought, text in ((["hm"], ["wörd "]), (["h", "m"], ["w", "ö", "rd", " "])):
        shown = ShownLogprobs(ChatLogprobs(tokens, tokens.special_ids, 0), tokens)
        shown.hear(TokenLogprob(byte, -1.0) for byte in "hm</end>\n\nwörd <call>".encode())
        for piece in thought:
            shown.take(piece)
        found = [entry for piece in text for entry in shown.take(piece)]
        assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == "wörd "


def test_a_token_in_two_pieces_is_told_once():
    tokens = SimpleNamespace(
        token_bytes=[b"ab", b"cd"].__getitem__, dialect=SimpleNamespace(shown=frozenset())
    )
    shown = ShownLogprobs(ChatLogprobs(tokens, (), 0), tokens)
    shown.hear([TokenLogprob(0, -1.0), TokenLogprob(1, -2.0)])
    told = [[entry["token"] for entry in shown.take(piece)] for piece in ("a", "bc", "d")]
    assert told == [["ab"], ["cd"], []]


def test_what_is_forgotten_is_not_left_on_disk_and_what_is_kept_is_nobody_else_s(tmp_path):
    tmp_path.chmod(0o755)
    old, new = ("resp_" + letter * 32 for letter in "ab")
    store = ResponseStore(ttl_s=0.05, max_bytes=1 << 20, folder=str(tmp_path))
    store.put("", old, {})
    time.sleep(0.1)
    store.put("", new, {})
    assert [file.name for file in tmp_path.iterdir()] == [new + ".json"]
    assert (tmp_path / (new + ".json")).stat().st_mode & 0o777 == 0o600
    time.sleep(0.1)
    ResponseStore(ttl_s=0.05, max_bytes=1 << 20, folder=str(tmp_path))
    assert not list(tmp_path.iterdir())
