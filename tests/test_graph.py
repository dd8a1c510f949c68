"""Each rule of the graph's check: one example that passes, one that fails, and what is said."""

from __future__ import annotations

import json

import pytest
import toys

from pipeline.build import build
from pipeline.compose import compose
from pipeline.drawing import as_json, as_mermaid, as_text
from pipeline.errors import GraphError
from pipeline.graph import FIELDS, GIVEN, OPTIONAL, ROUND, Node
from pipeline.plan import plan

GOOD = {"admit": "give", "decode": "double add sink"}
ALL = (toys.GIVE, toys.DOUBLE, toys.ADD, toys.SINK)


def said(graph, **options):
    with pytest.raises(GraphError) as caught:
        graph.check(**options)
    return [str(problem) for problem in caught.value.problems]


def test_a_good_graph_passes():
    toys.graph(GOOD, *ALL).check()


def test_unknown_stage_and_phase():
    assert said(toys.graph({"admit": "give", "decod": "double", "decode": "duble"}, *ALL)) == [
        "flow.decod: no such phase. Did you mean 'decode'?",
        "flow.decode: no stage named 'duble'. Did you mean 'double'?",
    ]


def test_a_stage_stands_once_in_a_phase():
    assert said(toys.graph({"admit": "give", "decode": "double sink sink"}, *ALL)) == [
        "flow.decode: stage 'sink' is there twice. Leave one out."
    ]
    toys.graph({"admit": "give", "first": "double sink", "decode": "double sink"}, *ALL).check()


def test_fields_must_exist():
    bad = toys.node("bad", "numbr", "dubble")
    assert said(toys.graph({"admit": "give", "decode": "bad"}, toys.GIVE, bad)) == [
        "stage 'bad': reads 'numbr', which is no field of a sequence. Did you mean 'number'?",
        "stage 'bad': writes 'dubble', which is no field of a sequence. Did you mean 'double'?",
    ]


def test_every_read_has_an_earlier_write():
    assert said(toys.graph({"admit": "give", "decode": "sink double"}, *ALL)) == [
        "stage 'sink' (decode): reads 'double', but it is first written by 'double', which runs "
        "after it. Put 'double' before 'sink' in flow.decode."
    ]
    assert said(toys.graph({"admit": "give", "decode": "sink"}, *ALL)) == [
        "stage 'sink' (decode): reads 'double', but nothing before it gives it a first value. Put a "
        "stage that writes 'double' before it."
    ]


def test_a_write_in_an_earlier_phase_counts_and_one_in_a_later_phase_does_not():
    toys.graph({"admit": "give", "prefill": "double", "decode": "sink"}, *ALL).check()
    text = said(toys.graph({"admit": "give", "decode": "sink", "finish": "double"}, *ALL))
    assert "nothing before it gives it a first value" in text[0]


def test_what_a_flow_may_go_without_is_still_not_read_too_early():
    use = toys.node("use", "extra number")
    toys.graph({"admit": "give", "decode": "use"}, toys.GIVE, use).check()
    toys.graph({"admit": "give", "decode": "guess use"}, toys.GIVE, toys.GUESS, use).check()
    graph = toys.graph({"admit": "give", "decode": "use guess"}, toys.GIVE, toys.GUESS, use)
    assert "first written by 'guess', which runs after it" in said(graph)[0]


def test_two_blind_writers_in_a_phase():
    other = toys.node("other", "number", "double")
    assert said(toys.graph({"admit": "give", "decode": "double other"}, *ALL, other)) == [
        "flow.decode: 'double' and 'other' both write 'double' without reading it. The first value "
        "would be lost: leave one out."
    ]
    phases = {"admit": "give", "first": "double", "decode": "other"}
    toys.graph(phases, *ALL, other).check()  # different phases
    reader = toys.node("reader", "number double", "double")
    toys.graph({"admit": "give", "decode": "double reader"}, *ALL, reader).check()  # reads it


def test_threads_fit_their_phase():
    late = toys.node("late", "number", thread="io")
    toys.graph({"admit": "give", "finish": "late"}, toys.GIVE, late).check()
    assert said(toys.graph({"admit": "give", "decode": "late"}, toys.GIVE, late)) == [
        "stage 'late' (decode): runs on the 'io' thread, but decode runs on owner. Move it to another "
        "phase."
    ]


def test_needs_are_met_or_say_what_to_choose():
    picky = toys.node("picky", "number", kv="rewind")
    flow = {"admit": "give", "decode": "picky"}
    toys.graph(flow, toys.GIVE, picky, kv="native rewind").check()
    graph = toys.graph(flow, toys.GIVE, picky, kv="rotating append")
    assert said(graph, suggest=lambda group, abilities: ["native", "paged"]) == [
        "stage 'picky': needs kv to rewind, but kv=rotating can only append. Choose kv=native or "
        "kv=paged."
    ]
    assert said(graph)[0].endswith("No option can: choose another flow.")
    assert said(toys.graph(flow, toys.GIVE, picky, kvv="x")) == [
        "stage 'picky': needs a kv, and there is none. Did you mean 'kvv'?"
    ]


def test_a_drafter_that_no_stage_asks_is_refused():
    nodes, flow = (toys.GIVE, toys.SINK, toys.DOUBLE), {"admit": "give", "decode": "double sink"}
    toys.graph(flow, *nodes, drafter="none").check()
    assert said(toys.graph(flow, *nodes, drafter="ngram")) == [
        "flow: no stage drafts, so drafter=ngram would do nothing. Choose flow=speculative or "
        "drafter=none."
    ]


def test_all_problems_come_together():
    bad = toys.node("bad", "seed nuber", "double", thread="io")
    graph = toys.graph({"decode": "double bad bad nix"}, toys.DOUBLE, bad, model="none")
    text = said(graph)
    assert len(text) == 10
    assert text[-1] == "model: somebody has to answer. Choose one: headrace list model"


def test_edges_name_the_last_writer_and_reach_back_in_a_loop():
    edges = {(e.source, e.target): e.fields for e in toys.graph(GOOD, *ALL).edges()}
    assert edges == {
        (("admit", "give"), ("decode", "double")): ("number",),
        (("decode", "add"), ("decode", "double")): ("number",),
        (("decode", "double"), ("decode", "add")): ("double",),
        (("admit", "give"), ("decode", "add")): ("number",),
        (("decode", "double"), ("decode", "sink")): ("double",),
        (("decode", "add"), ("decode", "sink")): ("number",),
    }


def test_drawings():
    graph = toys.graph(GOOD, *ALL)
    text = as_text(graph).splitlines()
    assert text[0] == "admit    once a request, preparation pool"
    assert "  ● double" in text
    assert any("double ─▶ add, sink" in line for line in text)
    assert '  decode_double -->|"double"| decode_sink' in as_mermaid(graph).splitlines()
    data = json.loads(as_json(graph))
    assert [stage["stage"] for stage in data["phases"]["decode"]] == ["double", "add", "sink"]
    assert {"from": ["decode", "add"], "to": ["decode", "sink"], "fields": ["number"]} in data[
        "edges"
    ]


def test_declarations_come_from_the_instance():
    class Wide:
        reads, writes, needs, thread = frozenset(), frozenset(), {}, "owner"

        def __init__(self):
            self.reads = frozenset({"seed"})

    assert Node.of("wide", Wide()).reads == {"seed"}


def test_the_engines_fields_exist():
    assert set(FIELDS) >= GIVEN | OPTIONAL


def flow_problems(*decode):
    """What is said of the fake recipe with this decode phase."""
    composed = compose("fake", [f"flow.decode=[{','.join(decode)}]"])
    with pytest.raises(GraphError) as caught:
        build(plan(composed))
    return [str(problem) for problem in caught.value.problems]


NO_END = (
    "flow.decode: no stage writes 'finish_reason', so no request would ever end. Put detokenize after "
    "accept in flow.decode."
)


def test_decode_itself_must_end_requests():
    text = flow_problems()
    assert NO_END in text
    assert NO_END in flow_problems("draft", "verify", "accept", "commit")


def test_a_round_makes_its_own_scores():
    assert flow_problems("draft", "accept", "detokenize", "commit") == [
        "stage 'accept' (decode): reads 'scores', which each round makes anew, but nothing in decode "
        "writes it. Put a stage that writes 'scores' before it in flow.decode."
    ]
    assert flow_problems("draft", "accept", "verify", "detokenize", "commit") == [
        "stage 'accept' (decode): reads 'scores', but it is first written by 'verify', which runs after "
        "it. Put 'verify' before 'accept' in flow.decode."
    ]


def test_each_field_of_a_round_is_written_before_it_is_read():
    assert [text.partition(",")[0] for text in flow_problems("verify", "accept", "draft")] == [
        "stage 'verify' (decode): reads 'proposal'",
        "stage 'accept' (decode): reads 'proposal'",
        "flow.decode: no stage writes 'finish_reason'",
    ]
    assert [
        t.partition(",")[0] for t in flow_problems("draft", "verify", "commit", "detokenize")
    ] == [
        "stage 'commit' (decode): reads 'emitted'",
        "stage 'commit' (decode): reads 'kept'",
        "stage 'detokenize' (decode): reads 'accepted'",
        "stage 'detokenize' (decode): reads 'emitted'",
        "stage 'detokenize' (decode): writes 'kept'",
    ]


def test_what_a_round_keeps_must_reach_the_rows():
    said = (
        "stage 'detokenize' (decode): writes 'kept', but nothing after it makes that the rows' state. "
        "Put commit after 'detokenize' in flow.decode."
    )
    assert flow_problems("draft", "verify", "accept", "detokenize") == [said]
    assert said in flow_problems("draft", "verify", "accept", "commit", "detokenize")


def test_the_rounds_fields_exist():
    assert set(FIELDS) >= ROUND
