"""What crosses between the processes arrives as it was, and an answer asked again tells only what is new."""

from __future__ import annotations

import json
import math
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    GraphError,
    HeadraceError,
    OpenError,
    Problem,
    RequestError,
)
from pipeline.isolate.faults import Fault
from pipeline.isolate.flight import Flight
from pipeline.isolate.wire import Line, News, Order, Reply, Submit, Told
from pipeline.types import (
    Accepted,
    Comparison,
    Delta,
    Done,
    Failed,
    Grammar,
    PromptLogprob,
    Request,
    Sampling,
    Speculation,
    TokenLogprob,
    Usage,
)

FULL = Request(
    id="x\n\u2028",
    messages=({"role": "user", "content": [{"type": "text", "text": "\0 😀 </s>"}]},),
    sampling=Sampling(temperature=0.1 + 0.2, seed=2**63 - 1, logit_bias=((7, -100.0),)),
    stop=("END", "\r\n"),
    logprobs=0,
    grammar=Grammar("regex", "[a-z]+", compact=True),
    template_args={"tools": [{"name": "f", "deep": {"a": [None, True, 1.5]}}]},
    session_id="",
    drawn_seed=0,
)
BEST = ((3, -math.inf), (4, -1e-300))
EVENTS = [
    Accepted(3, True, 2**62),
    Delta("wör\n", (1, 2), (TokenLogprob(1, -0.1, BEST), TokenLogprob(2, -math.inf))),
    Delta("", ()),
    Done(
        "stop",
        Usage(1, 2, 3, 4),
        2**63 - 1,
        {"total": 0.1 + 0.2},
        Speculation(1, 2, 3, (1, 0), (), 4),
        (None, PromptLogprob(1, -0.5, 2, BEST, Comparison(0.1, -2.0, False))),
        "END",
    ),
]


def over(message, reads):
    ours, theirs = socket.socketpair()
    sender, receiver = Line(ours, reads), Line(theirs, reads)
    sender.say(message)
    heard = next(receiver.heard())
    sender.close()
    receiver.close()
    return heard


def test_requests_arrive_as_they_were():
    assert over(Submit(3, FULL), Order).request == FULL
    assert over(Submit(0, Request("y", token_ids=(1, 2))), Order).request.token_ids == (1, 2)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_arrive_as_they_were(event):
    assert over(Told(3, event), News).event == event


@pytest.mark.parametrize(
    ("error", "like"),
    [
        (RequestError("no", param="n", code="c", status=413), RequestError),
        (BusyError("full", retry_after_s=2.5), BusyError),
        (ClosedError("gone", retry_after_s=9), ClosedError),
        (OpenError("no weights"), OpenError),
        (HeadraceError("another of ours"), HeadraceError),
        (ValueError("no call"), ValueError),
        (json.JSONDecodeError("no call", "", 0), ValueError),
    ],
)
def test_errors_are_told_alike(error, like):
    found = over(Told(1, Fault.of(error)), News).event.error()
    facts = vars(error) if isinstance(error, HeadraceError) else {}
    assert type(found) is like and (str(found), vars(found)) == (str(error), facts)


@pytest.mark.parametrize("kind", [ConfigError, GraphError])
def test_all_problems_of_a_configuration(kind):
    error = kind([Problem("a.b", "is wrong.", "Try c."), Problem("d", "too.")])
    found = over(Told(1, Fault.of(error)), News).event.error()
    assert type(found) is kind and found.problems == error.problems


def test_a_fault_of_ours_keeps_its_name():
    found = Fault.of(ZeroDivisionError("division by zero")).error()
    assert (type(found).__name__, str(found)) == ("ZeroDivisionError", "division by zero")
    assert not isinstance(found, HeadraceError), "it is an internal error: exit code 1, HTTP 500"


ODD = [
    Delta("a", (np.int64(1),)),
    Delta("a", (1,), (TokenLogprob(1, np.float32(0)),)),
    Delta(b"\xff", (1,)),
    Delta(None, (1,)),
    Delta("\ud800", (1,)),
    Done("odd", Usage(1, 2, 3), 1, {}, Speculation()),
    Fault("odd", "", facts={"x": object()}),
]


@pytest.mark.parametrize("event", ODD, ids=range(len(ODD)))
def test_what_cannot_cross_is_one_request_s_error(event):
    ours, theirs = socket.socketpair()
    sender, receiver = Line(ours, News), Line(theirs, News)
    sender.say(Told(3, event), Told(4, EVENTS[1]))
    sender.close()
    odd, fine = receiver.heard()
    assert (odd.id, type(odd.event), fine.event) == (3, Fault, EVENTS[1])
    assert isinstance(odd.event.error(), Exception)
    receiver.close()


def test_so_is_an_order_s_or_a_reply_s():
    assert over(Submit(3, replace(FULL, max_tokens="x")), Order).id == 3
    assert isinstance(over(Submit(3, replace(FULL, max_tokens="x")), Order).event, Fault)
    reply = over(Reply(5, {"x": object()}), News)
    assert (reply.id, reply.value) == (5, None) and reply.fault.message


def test_a_number_that_is_none_crosses():
    heard = over(Told(3, Delta("a", (1,), (TokenLogprob(1, math.nan),))), News)
    assert math.isnan(heard.event.logprobs[0].logprob)


def test_what_was_said_leaves_before_the_end():
    ours, theirs = socket.socketpair()
    sender, receiver = Line(ours, News), Line(theirs, News)
    sender.say(*(Told(n, Delta("x" * 1000, (n,))) for n in range(500)))
    threading.Thread(target=sender.close).start()  # it waits for who reads
    assert [told.id for told in receiver.heard()] == list(range(500))
    receiver.say(Told(1, EVENTS[0]))  # nobody hears it; nothing breaks
    receiver.close()


# --- an answer in two processes

WHOLE = [(f"{'abcdefghij'[i % 10]}", 100 + i) for i in range(20)]


def deltas(*cuts, start=0, stop=20):
    """The answer in bursts that end at these tokens; text comes one letter late, as held back."""
    at = start
    for cut in (*cuts, stop):
        text = "".join(letter for letter, _ in WHOLE[max(0, at - 1) : max(0, cut - 1)])
        text += WHOLE[-1][0] if cut == 20 else ""
        ids = tuple(token for _, token in WHOLE[at:cut])
        yield Delta(text, ids, tuple(TokenLogprob(token, -token / 8) for token in ids))
        at = cut


def flown(first, second):
    got = []
    flight = Flight(Request("x"), got.append)
    for event in (Accepted(3, seed=11), *first):
        assert not flight.hear(event)
    flight.next_go()
    assert (flight.request.drawn_seed, flight.goes) == (11, 2)
    for event in (Accepted(3, seed=11), *second):
        flight.hear(event)
    return flight, got


@pytest.mark.parametrize("had", range(1, 20))
@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (4, 9, 15), (12,)], ids=str)
def test_nothing_is_told_twice_and_nothing_is_left_out(had, cuts):
    _flight, got = flown(deltas(*range(1, had), stop=had), [*deltas(*cuts), EVENTS[-1]])
    assert [type(event) for event in got] == [Accepted, *[Delta] * (len(got) - 2), Done]
    said = got[1:-1]
    assert "".join(d.text for d in said) == "".join(letter for letter, _ in WHOLE)
    ids = [token for delta in said for token in delta.token_ids]
    assert ids == [token for _, token in WHOLE]
    assert [score.token_id for delta in said for score in delta.logprobs] == ids


def test_a_third_go():
    flight, got = flown(deltas(stop=5), deltas(stop=12))
    flight.next_go()
    flight.hear(Accepted(3, seed=11))
    for event in (*deltas(3, 8), EVENTS[-1]):
        flight.hear(event)
    assert "".join(d.text for d in got if isinstance(d, Delta)) == "abcdefghij" * 2
    assert flight.goes == 3


@pytest.mark.parametrize(
    "second",
    [
        [Delta("zz", (100, 101))],
        [Delta("a", (100, 999))],
        [*deltas(stop=3), EVENTS[-1]],
    ],
    ids=["text", "tokens", "shorter"],
)
def test_another_answer_is_never_sewn_on(second):
    _flight, got = flown(deltas(stop=8), second)
    assert isinstance(got[-1], Failed) and isinstance(got[-1].error, ClosedError)
    assert sum(isinstance(event, Delta) for event in got) == 1


def test_who_has_had_nothing_is_simply_asked_again():
    _flight, got = flown([], [*deltas(7), EVENTS[-1]])
    assert [type(event) for event in got] == [Accepted, Delta, Delta, Done]


def test_a_consumer_that_throws_loses_its_row():
    flight = Flight(Request("x"), lambda event: 1 / 0)
    flight.hear(Accepted(1))
    assert flight.cancelled
