"""From emitted tokens to delivered text: the same however the tokens arrive in bursts."""

from __future__ import annotations

import codecs
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.types import Batch, Delta, Emitted, Request, Sequence, TokenLogprob
from stages.detokenize import Detokenize
from stages.stop_text import StopText

EOS = 300
PIECES = {256: b"<|", 257: b"stop|>", 258: "né".encode(), 259: "\U0001f469‍".encode()[:5]}


class Decoder:
    def __init__(self, shown=frozenset()):
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id):
        return self.utf8.decode(PIECES.get(token_id, bytes([token_id % 256])))

    def flush(self):
        return self.utf8.decode(b"", final=True)


TARGET = SimpleNamespace(
    eos_ids=frozenset({EOS}), tokenizer=SimpleNamespace(decoder=Decoder), vocab_size=301
)


def sequence(stop=(), max_new=1000, ignore_eos=False):
    events = []
    request = Request(id="r", token_ids=(1,), stop=tuple(stop), ignore_eos=ignore_eos)
    return Sequence(request, events.append, prompt_ids=[1], max_new=max_new), events


def emit(row, ids, accepted=0):
    row.emitted = [Emitted(i, TokenLogprob(i, -0.5)) for i in ids]
    row.accepted = accepted
    Detokenize(TARGET).run(Batch([row], None, None))


def run(ids, cuts, stop=(), max_new=1000, ignore_eos=False):
    """Feed `ids` in bursts ending at `cuts`, until the row ends."""
    row, events = sequence(stop, max_new, ignore_eos)
    borders = [0, *sorted({c for c in cuts if 0 < c < len(ids)}), len(ids)]
    for start, end in pairwise(borders):
        if row.live and end > start:
            emit(row, ids[start:end], end - start - 1)
    assert row.error is None
    assert all(isinstance(e, Delta) and (e.text or e.token_ids) for e in events)
    return {
        "text": "".join(e.text for e in events),
        "ids": [i for e in events for i in e.token_ids],
        "logprobs": [p.token_id for e in events for p in e.logprobs],
        "usage": len(row.output_ids),
        "finish": row.finish_reason,
    }


def test_text_ids_and_logprobs_go_out_burst_by_burst():
    row, events = sequence()
    emit(row, list(b"ab"), 1)
    assert events == [Delta("ab", (97, 98), (TokenLogprob(97, -0.5), TokenLogprob(98, -0.5)))]
    assert (row.kept, row.finish_reason, row.output_ids) == (2, None, [97, 98])


def test_accepted_eos_in_mid_burst_is_counted_once_and_is_no_content():
    """behaviour D1: drafts [a, EOS, b], the target agrees to a and EOS."""
    row, events = sequence()
    emit(row, [97, EOS], 2)
    assert [(e.text, e.token_ids) for e in events] == [("a", (97,))]
    assert len(events[0].logprobs) == 1
    assert (row.finish_reason, row.output_ids, row.kept) == ("stop", [97, EOS], 2)


def test_eos_on_the_last_token_of_the_budget_is_a_stop():
    row, _ = sequence(max_new=2)
    emit(row, [97, EOS])
    assert row.finish_reason == "stop"


def test_a_stop_before_the_eos_of_the_same_burst_does_not_count_the_eos():
    result = run([*b"x!y", EOS], [], stop=["!"])
    assert result == {
        "text": "x", "ids": [120, 33], "logprobs": [120, 33], "usage": 2, "finish": "stop",
    }  # fmt: skip


def test_eos_alone_delivers_nothing():
    row, events = sequence()
    emit(row, [EOS])
    assert (events, row.finish_reason, row.kept) == ([], "stop", 1)


def test_ignored_eos_is_an_ordinary_token():
    result = run([97, EOS, 98], [], max_new=3, ignore_eos=True)
    assert (result["ids"], result["finish"]) == ([97, EOS, 98], "length")


@pytest.mark.parametrize("budget", range(1, 7))
def test_budget_in_mid_burst(budget):
    row, _ = sequence(max_new=budget)
    emit(row, list(b"abcdefg"[:budget]), budget)
    assert (row.finish_reason, len(row.output_ids), row.kept) == ("length", budget, 1 + budget)


def test_what_is_kept_ends_with_the_delivered_tokens():
    """Five drafts agreed to, but the stop string is complete at the second."""
    row, events = sequence(stop=["b"])
    emit(row, list(b"abcdef"), 5)
    assert row.kept == 1 + 2
    assert (events[0].text, events[0].token_ids) == ("a", (97, 98))


def test_a_correction_is_never_an_input_that_is_kept():
    row, _ = sequence(stop=["c"])
    emit(row, list(b"abc"), 2)
    assert (row.kept, row.finish_reason) == (3, "stop")


@pytest.mark.parametrize("field", ["cancelled", "error"])
def test_rows_that_are_not_live_keep_and_deliver_nothing(field):
    row, events = sequence()
    setattr(row, field, True if field == "cancelled" else ValueError("lost"))
    row.kept = 9
    emit(row, [97], 0)
    assert (row.kept, events, row.output_ids) == (0, [], [])


def test_a_failing_decoder_ends_its_own_row_only():
    bad, _ = sequence()
    good, events = sequence()
    bad.text_state = SimpleNamespace(decoder=None, stop=StopText(()))
    for row in (bad, good):
        row.emitted = [Emitted(97)]
    Detokenize(TARGET).run(Batch([bad, good], None, None))
    assert isinstance(bad.error, AttributeError) and bad.kept == 0
    assert events[0].text == "a" and good.error is None


def test_stop_over_token_borders_leaks_nothing():
    row, events = sequence(stop=["<|stop|>"])
    emit(row, [97, 256])
    assert events[-1].text == "a"
    emit(row, [257])
    assert events[-1] == Delta("", (257,), (TokenLogprob(257, -0.5),))
    assert row.finish_reason == "stop"


def test_text_held_back_for_a_stop_that_did_not_come_goes_out():
    assert run([*b"a<|", EOS], [1, 2], stop=["<|stop|>"])["text"] == "a<|"
    assert run(list(b"a<|"), [1, 2], stop=["<|stop|>"], max_new=3)["text"] == "a<|"


def test_half_a_character_at_the_end_is_a_replacement_mark():
    assert run([*"é".encode()[:1]], [], max_new=1)["text"] == "�"
    assert run(["é".encode()[0], EOS], [1])["text"] == "�"


def test_a_partial_character_holds_text_but_not_its_id():
    row, events = sequence()
    first, second = "é".encode()
    emit(row, [first])
    emit(row, [second])
    assert [(e.text, e.token_ids) for e in events] == [("", (first,)), ("é", (second,))]


def test_the_rest_of_the_decoder_may_complete_a_stop_string():
    result = run([97, "é".encode()[0]], [], stop=["�"], max_new=2)
    assert (result["text"], result["finish"]) == ("a", "stop")


@pytest.mark.parametrize(
    ("stops", "text", "released"),
    [(["bc", "abcd"], "xabcd", "xa"),  # complete first
     (["c", "abc"], "xabcd", "x"),  # complete together: the longest
     (["aab"], "aaab", "a"),  # begins inside an earlier near miss
     (["", "b"], "ab", "a")],  # an empty stop string is none
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 9])
def test_which_stop_string_wins_does_not_depend_on_the_pieces(stops, text, released, size):
    stop, out = StopText(stops), ""
    for start in range(0, len(text), size):
        piece, done = stop.push(text[start : start + size])
        out += piece
        if done:
            break
    assert (out, bool(done)) == (released, True)


tokens = st.sampled_from([*b"ab<|\n", *"é€\U0001f600".encode(), 0xFF, 256, 257, 258, 259, EOS])
stops = st.lists(
    st.sampled_from(["a", "ab", "ba", "aab", "<|stop|>", "|>", "\n", "é", "né", "b€", "�"]),
    max_size=3,
)


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(tokens, min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 23)),
    stop=stops,
    max_new=st.integers(1, 26),
    ignore_eos=st.booleans(),
)
@example(ids=[97, 97, 98], cuts=[1], stop=["ab"], max_new=9, ignore_eos=False)
def test_any_way_of_cutting_into_bursts_gives_the_same(ids, cuts, stop, max_new, ignore_eos):
    ids = ids[:max_new]  # the rule never emits past the budget, nor past EOS
    if EOS in ids and not ignore_eos:
        ids = ids[: ids.index(EOS) + 1]
    result = run(ids, cuts, stop, max_new, ignore_eos)
    assert result == run(ids, range(len(ids)), stop, max_new, ignore_eos)
    ended_by_eos = result["usage"] - len(result["ids"])
    assert ended_by_eos in (0, 1) and result["ids"] == result["logprobs"]
    assert not any(s in result["text"] for s in stop)
    content = [i for i in ids[: result["usage"]] if ignore_eos or i != EOS]
    assert result["ids"] == content
    decoder = Decoder()
    whole = "".join(map(decoder.push, content)) + decoder.flush()
    assert whole.startswith(result["text"])
    if result["finish"] and not any(s in whole for s in stop):
        assert result["text"] == whole
    if result["finish"] == "length":
        assert result["usage"] == max_new
