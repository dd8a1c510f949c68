"""The bench's arithmetic, its client against a server of canned bytes, and its table. No timing is asserted."""

from __future__ import annotations

import argparse
import socket
import threading
from pathlib import Path

import pytest

from pipeline.lab import bench as lab
from pipeline.lab import (
    lines_drafting,
    lines_engine,
    lines_own,
    lines_rivals,
    lines_rows,
    texts,
    turns,
    worker,
)
from pipeline.lab.contestants import Contestant, Field
from pipeline.lab.figures import Figure, Promise, median_interval, ratio
from pipeline.lab.lines import Bench, Line
from pipeline.lab.sse import BenchError, Reply, events, post, take
from pipeline.lab.table import header, machine, row, table


def test_the_interval_holds_the_median_and_is_the_same_each_time():
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    low, high = median_interval(samples)
    assert low < 5 < high
    assert (low, high) == median_interval(samples)
    assert median_interval([2.0] * 20) == (2.0, 2.0)


def test_four_samples_have_no_interval_and_their_promise_is_met_by_the_median():
    assert median_interval([1.0, 2.0, 3.0, 4.0]) is None
    figure = ratio("x", "x", [(n, 1) for n in (1, 2, 3, 9)], Promise(">=", 2.6))
    assert figure.interval is None and not figure.met


def test_a_wider_level_gives_a_wider_interval():
    samples = [float(n * n % 37) for n in range(20)]
    narrow, wide = median_interval(samples, 0.5), median_interval(samples, 0.99)
    assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


def test_a_ratio_is_the_median_of_pair_ratios_not_the_ratio_of_medians():
    figure = ratio("x", "x", [(1, 2), (10, 5), (30, 10)], Promise(">=", 2.0))
    assert figure.value == 2.0
    assert list(figure.samples) == [0.5, 2.0, 3.0]


@pytest.mark.parametrize(
    ("sense", "value", "interval", "met"),
    [
        (">=", 2.1, (2.0, 2.3), True),
        (">=", 2.1, (2.0, 2.19), False),
        ("<=", 0.3, (0.24, 0.4), False),
        ("<=", 0.3, (0.2, 0.4), True),
        ("<=", 0.2, None, True),
    ],
)
def test_a_promise_is_met_if_the_interval_reaches_it(sense, value, interval, met):
    bound = {">=": 2.2, "<=": 0.23}[sense]
    assert Figure("x", "x", value, Promise(sense, bound), interval=interval).met is met


def test_a_figure_whose_side_condition_fails_is_not_met():
    assert not ratio("x", "x", [(3, 1)], Promise(">=", 2), holds=False).met


STREAM = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b": keepalive 5/9\n\n"
    b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
    b'data: {"choices": [{"text": "lo", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9,'
    b' "prompt_tokens_details": {"cached_tokens": 3}}}\n\n'
    b"data: [DONE]\n\n"
    b"data: not read any more\n\n"
)


def test_events_are_read_until_done_and_comments_are_passed_over():
    reply = Reply()
    for index, event in enumerate(events(STREAM.splitlines(keepends=True))):
        take(reply, event, float(index))
    assert reply.text == "Hello"
    assert reply.times == [1.0, 2.0]
    assert (reply.prompt_tokens, reply.tokens, reply.cached, reply.finish) == (7, 2, 3, "length")
    assert reply.rate == 1.0


def test_an_error_event_is_no_answer():
    with pytest.raises(BenchError, match="no room"):
        take(Reply(), {"error": {"message": "no room"}}, 0.0)


@pytest.fixture
def canned():
    """Serves one reply to each connection and remembers what was asked; HTTP/1.0 as mlx-lm does."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked, replies = [], []

    def serve():
        while replies:
            connection, _ = listener.accept()
            request = b""
            while not request.endswith(b"}"):
                request += connection.recv(65536)
            asked.append(request)
            connection.sendall(replies.pop(0))
            connection.close()

    def start(*given):
        replies.extend(given)
        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    yield start, asked
    listener.close()


def test_a_stream_over_a_socket_that_ends_with_the_connection(canned):
    start, asked = canned
    head = b"HTTP/1.0 200 OK\r\nContent-type: text/event-stream\r\n\r\n"
    reply = post(start(head + STREAM), "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert reply.text == "Hello"
    assert 0 < reply.first <= reply.times[-1] <= reply.seconds
    assert b'"include_usage": true' in asked[0]


def test_a_refusal_says_what_the_server_said(canned):
    start, _ = canned
    port = start(b'HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\n{"no": 1}')
    with pytest.raises(BenchError, match=r'HTTP 400.*\{"no": 1\}'):
        post(port, "/v1/completions", {})


def test_tokens_between_instants_are_counted_with_their_fractions():
    reply = Reply(began=10.0, texts=["a"] * 5, times=[1.0, 2.0, 3.0, 4.0, 5.0], tokens=5)
    assert reply.tokens_between(11.0, 15.0) == 4
    assert reply.tokens_between(11.5, 13.0) == 1.5


def test_streams_together_are_timed_only_while_all_are_under_way():
    slow = Reply(began=0.0, texts=["a"] * 4, times=[4.0, 6.0, 8.0, 10.0], tokens=4)
    fast = Reply(began=1.0, texts=["a"] * 9, times=[float(t) for t in range(1, 10)], tokens=9)
    assert lines_rivals.together([slow, fast]) == pytest.approx(1.5)
    with pytest.raises(BenchError, match="under way"):
        lines_rivals.together([slow, Reply(began=50.0, texts=["a"], times=[1.0], tokens=1)])


def test_the_first_difference_of_two_texts_is_named():
    def said(text):
        return Reply(texts=[text], times=[0.0], tokens=1)

    assert lines_rivals.agreement([said("a b")], [said("a b")]) == "same text"
    note = lines_rivals.agreement([said("x"), said("a bc")], [said("x"), said("a bd")])
    assert note == "stream 2 differs at character 3: 'c' / 'd'"


def test_prompts_differ_from_their_first_words_on_and_are_the_same_each_run():
    assert texts.prose(1) == texts.prose(1)
    assert texts.prose(1)[:12] != texts.prose(2)[:12]
    assert len(texts.prose(1, 90)) > len(texts.prose(1))


def test_a_text_is_cut_to_its_tokens_between_words():
    text = texts.cut(texts.prose(3), 100, lambda text: len(text.split()))
    assert len(text.split()) == 100
    assert texts.prose(3).startswith(text)


@pytest.mark.parametrize("name", ["mill", "continue", "copy_clean", "copy_imperfect"])
def test_the_texts_are_in_the_package(name):
    assert len(texts.read(name)) > 100


def test_who_begins_a_round_changes_and_results_keep_their_places():
    order = []
    bench = Bench(Field({}, {}), 1, pairs=4, say=lambda text: None)
    works = [lambda index, name=name: order.append(name) or name for name in "abc"]
    assert bench.alternate("x", works) == [["a", "b", "c"]] * 4
    assert "".join(order) == "abcbcacababc"


class Started:
    """A field of names; what was started when."""

    def __init__(self):
        self.running, self.starts = [], []

    def take(self, *names):
        for name in names:
            if name not in self.running:
                self.running.append(name)
                self.starts.append(name)
        return list(names)

    def dismiss(self, *names):
        self.running = [name for name in self.running if name not in names]


@pytest.mark.parametrize(("pairs", "starts"), [(1, "ab"), (2, "abba"), (5, "abba")])
def test_servers_of_a_comparison_are_started_in_both_orders(pairs, starts):
    field, known = Started(), []
    bench = Bench(field, 1, pairs=pairs, say=lambda text: None)
    rounds = bench.compare("x", "ab", lambda one, index: f"{one}{index}", known.append)
    assert rounds == [[f"a{turn}", f"b{turn}"] for turn in range(pairs)]
    assert "".join(field.starts) == starts
    assert "".join(known) == "ab" * (len(starts) // 2)


def test_rows_that_cost_more_and_more_are_not_linear():
    even = {rows: 0.2 + 0.05 * rows for rows in lines_engine.ROWS}
    square = {rows: 0.2 + 0.05 * rows * rows for rows in lines_engine.ROWS}
    assert lines_engine._linear(even).met
    assert not lines_engine._linear(square).met


def test_a_contestant_that_ends_at_once_shows_what_it_said():
    one = Contestant("x", ["-c", "print('no such recipe'); raise SystemExit(2)"], 1)
    one.start()
    with pytest.raises(BenchError, match="no such recipe"):
        one.wait()
    one.stop()


def test_every_figure_has_one_name_and_lines_are_chosen_by_it():
    names = [name for line in lab.LINES for name in line.figures]
    assert len(names) == len(set(names)) > 20
    assert lab.chosen("ngram/clean", "ngram")
    assert lab.chosen("ngram/clean", "*/clean")
    assert not lab.chosen("prefix", "prefill")


def test_an_unknown_name_is_answered_with_the_names(capsys):
    args = argparse.Namespace(only=["decoding"], list=False, pairs=1, threads=1, json=None)
    assert lab.run(args) == 2
    assert "decode/shipped" in capsys.readouterr().err


def test_the_table_says_what_is_met_and_what_is_not():
    good = ratio("a", "first", [(3, 1)], Promise(">=", 2))
    bad = Figure("b", "second", 0.4, Promise("<=", 0.3), "ms")
    text = table([good, bad], {"c": "no server"}, 90)
    assert "NOT MET" in text
    assert "NOT MEASURED c: no server" in text
    assert text.splitlines()[-1] == "2 NOT MET, in 1.5 minutes"
    assert "every line met" in table([good], {}, 1)
    assert row(good) == "a  first  3.00  of 1  >= 2  met"
    five = ratio("a", "first", [(3, 1)] * 5, Promise(">=", 2))
    assert row(five) == "a  first  3.00  [3.00, 3.00] of 5  >= 2  met"


def test_the_header_names_machine_versions_and_threads():
    text = header(machine(1), 20)
    assert "mlx-lm" in text
    assert "BLAS threads of every contestant: 1" in text


def test_a_round_of_the_engine_is_timed_on_the_fake_model():
    assert {1, 3} == set(worker.best_rounds([1, 3], 1))


def test_copy_lines_keep_the_promised_bounds():
    names = [name for line in lines_own.LINES for name in line.figures]
    assert names == ["prefix", "sampling/plain", "sampling/wide", "ngram/clean", "ngram/imperfect"]


def test_drafting_lines_ask_each_row_something_of_its_own():
    names = [name for line in lines_drafting.LINES for name in line.figures]
    assert names[:2] == ["suffix/lookup", "suffix/clean"]
    assert names[2:] == ["adaptive/free1", "adaptive/free4", "adaptive/copy1", "adaptive/copy4"]
    for text in ("free", "copy_clean"):
        asked = lines_drafting.prompts(text, 4)
        assert len(set(asked)) == 4
        assert all(len(prompt) > 50 for prompt in asked)


class Gaps:
    """What `pipeline.lab.turns` would print."""

    pairs = 2

    def __init__(self, monkeypatch, seen):
        monkeypatch.setattr(lines_rows, "_turns", lambda *_: seen)


def test_a_stall_is_counted_in_the_longest_chunk(monkeypatch):
    seen = [{"gap": 1.4, "chunks": [0.5, 1.0]}, {"gap": 1.2, "chunks": [1.0, 0.9]}]
    (figure,) = lines_rows.stall(Gaps(monkeypatch, seen))
    assert list(figure.samples) == [1.4, 1.2] and figure.met


def test_a_row_that_costs_more_among_many_shows(monkeypatch):
    square = [{str(n): n * n * 1e-3 for n in turns.ROWS}]
    straight = [{str(n): (5 + n) * 1e-3 for n in turns.ROWS}]
    assert not lines_rows.linear(Gaps(monkeypatch, square))[0].met
    assert lines_rows.linear(Gaps(monkeypatch, straight))[0].value == pytest.approx(1)


def test_turns_of_the_fake_model_are_timed(monkeypatch):
    import pipeline

    for name, value in (("LONG_TOKENS", 600), ("FINISHED", 3), ("MANY", 24), ("ROWS", (1, 2))):
        monkeypatch.setattr(turns, name, value)
    with pipeline.load("fake", "drafter=none", "tier=none", "model.delay_ms=2") as engine:
        seen = turns.stall(engine)
        assert len(seen["chunks"]) >= 3 and seen["gap"] == max(seen["gaps"]) > 0.002
        assert set(turns.rows(engine)) == {"1", "2"}
        assert min(turns.finished(engine).values()) > 0


@pytest.mark.parametrize(("asked", "taken"), [(20, 8), (2, 2)])
def test_a_line_that_needs_few_pairs_takes_no_more(asked, taken):
    seen = []
    line = Line(("x",), lambda bench: seen.append(bench.pairs) or [], most=8)
    lab._attempt(line, Bench(Started(), 1, asked), Path(), {"x"}, [], {})
    assert seen == [taken]


@pytest.mark.parametrize("where", ["", "no/such/x.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    where, tmp_path, capsys
):
    with pytest.raises(SystemExit, match="2"):
        lab.main(["--only", "check", "--json", str(tmp_path / where)])
    assert "argument --json" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
