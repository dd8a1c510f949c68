"""`prompt_logprobs` and `priority` over HTTP: vLLM's shapes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.types import PromptLogprob

ENTRIES = (
    None,
    PromptLogprob(2, -0.25, 1, ((2, -0.25), (3, -1.5))),
    PromptLogprob(4, float("-inf"), 9, ((2, -0.5), (3, -1.0))),
)
SHAPE = [
    None,
    {
        "2": {"logprob": -0.25, "rank": 1, "decoded_token": "lo "},
        "3": {"logprob": -1.5, "rank": 2, "decoded_token": "wör"},
    },
    {
        "2": {"logprob": -0.5, "rank": 1, "decoded_token": "lo "},
        "3": {"logprob": -1.0, "rank": 2, "decoded_token": "wör"},
        "4": {"logprob": -9999.0, "rank": 9, "decoded_token": "\ufffd"},
    },
]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def scoring(engine, script):
    """The scripted engine, which also scores the prompts that ask for it."""

    def plan(request):
        for event in script.greeting(request):
            scored = isinstance(event, type(script.done("stop", 0)))
            asked = request.prompt_logprobs is not None
            yield replace(event, prompt_logprobs=ENTRIES) if scored and asked else event

    engine.plan = plan
    return engine


def test_chat_has_them_beside_the_choices(scoring, raw):
    status, _, reply = raw.post(CHAT, {**HELLO, "prompt_logprobs": 2, "n": 2})
    assert status == 200 and reply["prompt_logprobs"] == SHAPE
    assert all("prompt_logprobs" not in choice for choice in reply["choices"])
    assert sorted(str(r.prompt_logprobs) for r in scoring.requests) == ["2", "None"]


def test_completions_have_them_in_every_choice_and_score_each_prompt_once(scoring, raw):
    status, _, reply = raw.post(TEXT, {"prompt": ["a", "b"], "n": 2, "prompt_logprobs": 0})
    assert status == 200 and "prompt_logprobs" not in reply
    assert [choice["prompt_logprobs"] for choice in reply["choices"]] == [SHAPE] * 4
    assert sorted(str(r.prompt_logprobs) for r in scoring.requests) == ["0", "0", "None", "None"]


def test_who_does_not_ask_gets_the_usual_object(scoring, raw):
    for path, body in ((CHAT, HELLO), (TEXT, {"prompt": "a"})):
        _, _, reply = raw.post(path, {**body, "prompt_logprobs": None})
        assert "prompt_logprobs" not in reply and "prompt_logprobs" not in reply["choices"][0]


@pytest.mark.parametrize("wrong", [-1, 21, True, "3", 1.5])
def test_counts_out_of_range_are_named(raw, wrong):
    status, _, reply = raw.post(TEXT, {"prompt": "a", "prompt_logprobs": wrong})
    assert (status, reply["error"]["param"]) == (400, "prompt_logprobs")


def test_a_stream_cannot_supply_them_and_says_so(raw):
    for path, body in ((CHAT, HELLO), (TEXT, {"prompt": "a"})):
        status, _, reply = raw.post(path, {**body, "prompt_logprobs": 1, "stream": True})
        assert (status, reply["error"]["param"]) == (400, "prompt_logprobs")
        assert "stream" in reply["error"]["message"]


def test_priority_and_client_reach_the_request(engine, raw):
    raw.post(TEXT, {"prompt": "a", "priority": -3, "user": "anna"})
    raw.post(CHAT, {**HELLO, "priority": None})
    assert [(r.priority, r.client) for r in engine.requests] == [(-3, "anna"), (0, "127.0.0.1")]
    for wrong in (9, -9, 1.0, "1", True):
        status, _, reply = raw.post(TEXT, {"prompt": "a", "priority": wrong})
        assert (status, reply["error"]["param"]) == (400, "priority")
