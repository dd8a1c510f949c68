"""The Python API: names and types are checked before anything is queued."""

from __future__ import annotations

import pytest
from support import serving

import pipeline
from pipeline.errors import ClosedError, RequestError


@pytest.fixture(scope="module")
def engine():
    with serving(recipe="fake") as engine:
        yield engine


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"temprature": 1}, "temprature: no such field. Did you mean 'temperature'?"),
        ({"stop": 5}, "stop: wants a text or a list of texts, none of them empty, got 5"),
        ({"stop": ""}, "stop: wants a text or a list of texts, none of them empty, got ''"),
        ({"max_tokens": "5"}, "max_tokens: wants a whole number, got '5'"),
        ({"max_tokens": 2.5}, "max_tokens: wants a whole number, got 2.5"),
        ({"max_tokens": -1}, "max_tokens: wants a whole number of at least 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: wants a whole number of at least 1"),
        ({"temperature": "hot"}, "temperature: wants a number, got 'hot'"),
        ({"seed": "x"}, "seed: wants a whole number, got 'x'"),
        ({"ignore_eos": "no"}, "ignore_eos: wants True or False, got 'no'"),
        ({"logit_bias": {"a": 1}}, "logit_bias: wants a mapping of token ids to numbers"),
        ({"logit_bias": {10**6: 1}}, "logit_bias: token id 1000000 is not in the vocabulary"),
    ],
)
def test_a_wrong_field_is_named(engine, wanted, message):
    with pytest.raises(RequestError, match=r"^.*") as error:
        engine.generate("x", **wanted)
    assert str(error.value).startswith(message)
    assert error.value.param == next(iter(wanted))
    assert engine.generate("x", max_tokens=2)["completion_tokens"] == 2


@pytest.mark.parametrize("prompt", [None, 5, [1.5], [], ["a"]])
def test_a_wrong_prompt_is_named(engine, prompt):
    with pytest.raises(RequestError, match="prompt"):
        engine.generate(prompt)


def test_what_may_be_said(engine):
    plain = engine.generate("x", max_tokens=4)
    assert engine.generate("x", max_tokens=4, seed=None, temperature=0)["text"] == plain["text"]
    assert engine.generate("x", max_tokens=4, logit_bias={"52": -100.0})["text"] != plain["text"]
    stopped = engine.generate("x", max_tokens=40, stop=plain["text"][2:])
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"][:2], "stop")
    assert engine.generate("x", max_tokens=0)["finish_reason"] == "length"


def test_an_engine_that_is_not_open_says_so():
    with pytest.raises(ClosedError, match="use `with"):
        pipeline.load("fake").generate("x")
