"""Fair queueing by tokens: shares, priorities, nobody starves, nothing is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pipeline.types import Request, Sequence
from stages.schedulers.fair import Fair


def ask(client: str, tokens: int = 100, priority: int = 0) -> Sequence:
    """A request of that many tokens, half of them its answer's."""
    request = Request(client, token_ids=(1,), client=client, priority=priority)
    sequence = Sequence(request, print)
    sequence.prompt_ids, sequence.max_new = [1] * (tokens // 2), tokens - tokens // 2
    return sequence


def serve(fair: Fair, waiting: list[Sequence], count: int) -> list[Sequence]:
    """Start and finish one after the other, as one row would."""
    served = []
    for _ in range(count):
        first = fair.order(waiting, [])[0]
        waiting.remove(first)
        fair.started(first)
        end(fair, first)
        served.append(first)
    return served


def end(fair: Fair, sequence: Sequence, computed: int | None = None) -> None:
    whole = len(sequence.prompt_ids) + sequence.max_new
    sequence.processed_ids = [1] * (whole if computed is None else computed)
    fair.finished(sequence)


def clients(served: list[Sequence]) -> str:
    return "".join(s.request.client for s in served)


def test_a_client_with_a_long_queue_does_not_hold_up_another():
    waiting = [ask("a") for _ in range(10)] + [ask("b") for _ in range(3)]
    assert clients(serve(Fair(), waiting, 7)) == "abababa"


def test_one_client_alone_is_first_come_first_served():
    waiting = [ask("a", tokens) for tokens in (900, 10, 300, 20)]
    assert Fair().order(waiting, []) == waiting


def test_shares_are_tokens_not_requests():
    waiting = [ask("a", 300) for _ in range(20)] + [ask("b", 100) for _ in range(60)]
    served = serve(Fair(), waiting, 40)
    assert Counter(clients(served)) == {"a": 10, "b": 30}


def test_weights_are_shares():
    waiting = [ask(name) for name in "ab" for _ in range(40)]
    served = serve(Fair(weights={"a": 3.0}), waiting, 40)
    assert Counter(clients(served)) == {"a": 30, "b": 10}


def test_a_step_of_priority_is_a_factor():
    waiting = [ask("a", priority=1) for _ in range(40)] + [ask("b") for _ in range(40)]
    served = serve(Fair(priority_factor=4.0), waiting, 40)
    assert Counter(clients(served)) == {"a": 32, "b": 8}


def test_higher_priority_of_the_same_client_overtakes():
    waiting = [ask("a"), ask("a"), ask("a", priority=2)]
    assert Fair().order(waiting, []) == [waiting[2], waiting[0], waiting[1]]


@pytest.mark.parametrize("newcomers", ["same", "fresh"])
def test_nobody_starves_behind_an_endless_stream_of_better_ones(newcomers):
    fair, old = Fair(weights={"old": 0.5}), ask("old", 2000, priority=-1)
    waiting: list[Any] = [old]
    for turn in range(3000):
        waiting.append(ask("new" if newcomers == "same" else f"new{turn}", 4, priority=1))
        if serve(fair, waiting, 1) == [old]:
            return
    pytest.fail("it was never served")


def test_what_was_not_computed_is_not_charged():
    fair = Fair()
    first = ask("a", 1000)
    others = [ask("a"), ask("b")]
    fair.order([first], [])
    fair.started(first)
    end(fair, first, computed=10)  # a saved prefix, an early end, a client that left
    assert fair.order(others, []) == others


def test_a_request_given_up_in_the_queue_costs_nothing():
    fair, gone, kept = Fair(), ask("a", 1000), ask("a")
    other = ask("b", 200)
    assert fair.order([gone, kept, other], []) == [other, gone, kept]
    fair.finished(gone)
    assert fair.order([kept, other], []) == [kept, other]


def test_answers_of_unknown_length_are_not_taken_for_the_whole_context():
    fair, endless, short = Fair(answer_tokens=50), ask("a", 100), ask("b", 200)
    endless.max_new = 8000
    assert fair.order([short, endless], []) == [endless, short]


def test_nothing_is_kept_of_clients_that_have_left():
    fair = Fair()
    serve(fair, [ask(f"client {n}", 50 + n % 7) for n in range(500)], 500)
    assert len(fair._charged) <= 1
    assert not fair._arrived
    assert not fair._running


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("weights", {"a": 0.0}),
        ("weights", {"a": float("inf")}),
        ("weights", {"a": 1e-320}),  # a rate of 0 with a low priority
        ("priority_factor", 0.5),
        ("answer_tokens", 0),
        ("step_tokens", 0),
    ],
)
def test_settings_out_of_range_are_named(setting, value):
    with pytest.raises(ValueError, match=f"^{setting}: wants "):
        Fair(**{setting: value})
