"""Answers of a given form: legal, complete, and the same tokens whatever drafts them."""

from __future__ import annotations

import itertools
import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support import ORACLE, Running, prompt_ids, serving, together

from pipeline.errors import RequestError
from pipeline.grammars import make_grammar
from pipeline.types import NEUTRAL, Grammar, Request, Sampling
from stages.constraints.bounds import SIZE, too_much
from stages.constraints.llguidance import LLGuidance, _in_its_words
from stages.constraints.none import Free
from stages.constraints.reasoning import AfterReasoning, Marks
from stages.models.fake import ByteTokens
from stages.samplers.standard import Standard

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["ab", "cd"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-f]{3}-[0-9]{2,40}"},
    "choice": {"choice": ['a "quoted" é\n', "Paris", "Parma"]},
    "gbnf": {"gbnf": 'root ::= "x" [0-9] [0-9] "y"'},
    "lark": {"lark": 'start: "ab" /[c-e]{2}/ "f"'},
}
DRAFTERS = {
    "grammar": ("drafter=grammar",),
    "ngram": ("drafter=ngram", "drafter.min_ngram=1"),
    "random": ("drafter=random",),
    "often wrong": (ORACLE, "+drafter.wrong_every=3"),
}
WANTED = {"max_tokens": 48, "temperature": 0.9, "seed": 4}
BIAS = {ord("]"): 4.0}  # a model that thinks for some tokens only


def asks(form: str, **more: object) -> dict[str, object]:
    return {**WANTED, "grammar": FORMS[form], **more}


@pytest.fixture(scope="module")
def plain():
    """Answers of plain decoding, by (form, temperature)."""
    with serving("flow=plain", "drafter=none", "tier=none", "constraint=llguidance") as engine:
        return {
            (form, heat): engine.generate(prompt_ids(20), **asks(form, temperature=heat))
            for form in FORMS
            for heat in (0.0, 0.9)
        }


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_answers_have_their_form_and_end_with_it(plain, heat):
    answer = {form: plain[form, heat]["text"] for form in FORMS}
    assert re.fullmatch("[a-f]{3}-[0-9]{2,40}", answer["regex"])
    assert answer["choice"] in FORMS["choice"]["choice"]
    assert re.fullmatch("x[0-9]{2}y", answer["gbnf"])
    assert re.fullmatch("ab[c-e]{2}f", answer["lark"])
    ended = {form: plain[form, heat]["finish_reason"] for form in ("choice", "gbnf", "lark")}
    assert ended == {"choice": "stop", "gbnf": "stop", "lark": "stop"}
    if plain["schema", heat]["finish_reason"] == "stop":
        value = json.loads(answer["schema"])
        assert set(value) == {"name", "kind"}
        assert value["kind"] in ("ab", "cd")


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_speculative_equals_plain(plain, drafter):
    with serving("flow=speculative", *drafter, "constraint=llguidance", "tier=none") as engine:
        for (form, heat), wanted in plain.items():
            got = engine.generate(prompt_ids(20), **asks(form, temperature=heat))
            assert (got["token_ids"], got["finish_reason"]) == (
                wanted["token_ids"],
                wanted["finish_reason"],
            ), (form, heat)


def test_rows_with_different_forms_and_none_in_one_batch(plain):
    overrides = ("flow=speculative", "drafter=grammar", "constraint=llguidance", "tier=none")
    with serving(*overrides, "limits.max_rows=8") as engine:
        free = engine.generate(prompt_ids(20), **WANTED)["token_ids"]
        runs = {form: Running(engine, prompt_ids(20), **asks(form)) for form in FORMS}
        other = Running(engine, prompt_ids(20), **WANTED)
        for form, run in runs.items():
            assert run.result()["token_ids"] == plain[form, 0.9]["token_ids"]
        assert other.result()["token_ids"] == free
        assert len(together(engine, [prompt_ids(9)] * 3, **asks("gbnf"))) == 3


def think_in_brackets(engine):
    """As if the model's family marked reasoning so."""
    dialect = engine.tokenizer.dialect
    dialect.reasoning, dialect.reasoning_ids = ("[", "]"), ([ord("[")], [ord("]")])


@pytest.mark.parametrize("wrong_every", [0, 3])
def test_a_section_of_thinking_that_ends_inside_a_proposal(wrong_every):
    """A drafter that knows the answer runs over the section's end, and over the form's, at any place of
    its proposals; one that is often wrong is cut there by the target."""
    common = ("constraint=llguidance", "tier=none")
    form = {"regex": "[a-f]{3}-[0-9]{4}"}
    prompt = [*prompt_ids(20), ord("[")]
    asks = [
        {"max_tokens": 48, "temperature": 0.9, "seed": seed, "grammar": form, "logit_bias": BIAS}
        for seed in range(8)
    ]
    with serving("flow=plain", "drafter=none", *common) as engine:
        think_in_brackets(engine)
        plain = [engine.generate(prompt, **wanted) for wanted in asks]
    thought = [answer["token_ids"].index(ord("]")) for answer in plain]
    assert len(set(thought)) > 3
    for answer, end in zip(plain, thought, strict=True):
        text = bytes(answer["token_ids"][end + 1 :]).decode()
        assert re.fullmatch(form["regex"], text) and answer["finish_reason"] == "stop"
    oracle = ("flow=speculative", ORACLE, f"+drafter.wrong_every={wrong_every}", "depth.max=5")
    with serving(*oracle, *common) as engine:
        think_in_brackets(engine)
        engine.pipeline.parts["drafter"].book = [prompt + a["token_ids"] for a in plain]
        for answer, wanted in zip(plain, asks, strict=True):
            got = engine.generate(prompt, **wanted)
            assert got["token_ids"] == answer["token_ids"]
            assert got["speculation"]["accepted"] > 0


def test_what_a_schema_dictates_is_drafted_and_accepted():
    form = {"gbnf": 'root ::= "{the whole of this is forced}" [a-z] "!"'}
    with serving(
        "drafter=grammar", "constraint=llguidance", "flow=speculative", "depth.max=16"
    ) as engine:
        answer = engine.generate(prompt_ids(10), grammar=form, max_tokens=60)
    assert re.fullmatch(r"\{the whole of this is forced\}[a-z]!", answer["text"])
    assert answer["speculation"]["accepted"] >= 20
    assert answer["speculation"]["target_calls"] < len(answer["token_ids"]) / 2


def test_the_budget_and_completion_on_the_same_token():
    with serving("constraint=llguidance", "tier=none") as engine:
        for room, reason in ((3, "length"), (4, "stop"), (5, "stop")):
            answer = engine.generate(prompt_ids(10), grammar=FORMS["gbnf"], max_tokens=room)
            assert answer["finish_reason"] == reason
            assert len(answer["token_ids"]) == min(room, 4)


def test_a_model_that_loves_blanks_completes_its_json():
    form = {"json_schema": {**SCHEMA, "properties": {**SCHEMA["properties"], "list": LIST}}}
    blanks = {32: 60.0, 10: 60.0, 9: 60.0}
    with serving("constraint=llguidance", "tier=none") as engine:
        answer = engine.generate(prompt_ids(20), grammar=form, max_tokens=900, logit_bias=blanks)
        short = engine.generate(prompt_ids(20), grammar=form, max_tokens=100, logit_bias=blanks)
    assert answer["finish_reason"] == "stop"
    assert set(json.loads(answer["text"])) >= {"name", "kind"}
    assert 10 < max(map(len, re.findall(r"[ \n\t]+", answer["text"]))) <= 40
    assert short["finish_reason"] == "length"  # so it says that it is not complete


LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
WRONG = {
    "unknown": ({"json_schema": {"type": "object", "not": {"required": ["a"]}}}, "not"),
    "deep": (
        {"json_schema": {"properties": {"a": {"unevaluatedItems": True}}}},
        "unevaluatedItems",
    ),
    "schema": ({"json_schema": {"type": "objekt"}}, "objekt"),
    "regex": ({"regex": "(["}, "unclosed"),
    "lark": ({"lark": "start: foo"}, "foo"),
    "gbnf": ({"gbnf": "root = 5"}, "line 1"),
    "text": ({"json_schema": "{"}, "line 1"),
    "kind": ({"xml": "<a/>"}, "wants one of"),
    "empty": ({"choice": []}, "wants one of"),
}


CHAIN = {f"n{n}": {"properties": {"a": {"$ref": f"#/$defs/n{n + 1}"}}} for n in range(5000)}
LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}
CALLS = "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(5000))
LARK = "".join(f'r{n}: "a" r{n + 1}?\n' for n in range(5000))
LETTERS = "abcdefghijklmnopqrst"
JOINED = {
    c: {"pattern": f".*{c}.*", "$ref": f"#/$defs/{d}"} for c, d in itertools.pairwise(LETTERS)
}
JOINED["t"] = {"pattern": ".*t.*"}
HUGE = {  # each ended the process, took for ever, or was found to have no answer when one was to be drawn
    "references": ({"json_schema": {"$defs": CHAIN, "$ref": "#/$defs/n0"}}, "levels deep"),
    "gbnf rules": ({"gbnf": f'root ::= r0\n{CALLS}r5000 ::= "z"'}, "levels deep"),
    "lark rules": ({"lark": f'start: r0\n{LARK}r5000: "z"'}, "levels deep"),
    "hidden rules": ({"lark": f'start: r0 # "\n{LARK}r5000: "z"'}, "levels deep"),
    "lark schema": (
        {"lark": "start: %json " + json.dumps({"$defs": CHAIN, "$ref": "#/$defs/n0"})},
        "levels deep",
    ),
    "nothing fits": ({"json_schema": {"$defs": LOOP, "$ref": "#/$defs/a"}}, "compiled"),
    "patterns": (
        {"json_schema": {"allOf": [{"pattern": f".*{c}.*"} for c in LETTERS]}},
        "10 patterns",
    ),
    "patterns by reference": (
        {"json_schema": {"$defs": JOINED, "$ref": "#/$defs/a"}},
        "10 patterns",
    ),
    "joined rules": (
        {"gbnf": "start: " + " & ".join(f"/.*{c}.*/" for c in LETTERS)},
        "10 patterns",
    ),
    "large": ({"json_schema": {"enum": [str(n) for n in range(200_000)]}}, "characters"),
}


@pytest.mark.parametrize(("form", "said"), (WRONG | HUGE).values(), ids=(WRONG | HUGE).keys())
def test_what_cannot_be_compiled_says_where(form, said):
    with serving("constraint=llguidance") as engine:
        with pytest.raises(RequestError, match=said) as caught:
            engine.generate([65], grammar=form, max_tokens=4)
        assert caught.value.param == "grammar"
        assert len(engine.generate([65], max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_a_recipe_without_constraints_refuses_and_says_what_to_do():
    with serving("constraint=none") as engine, pytest.raises(RequestError, match="llguidance"):
        engine.generate([65], grammar=FORMS["gbnf"], max_tokens=4)


# --- the matcher itself

TARGET = SimpleNamespace(tokenizer=ByteTokens(None), vocab_size=258, eos_ids=frozenset({257}))


@pytest.fixture(scope="module")
def constraint():
    part = LLGuidance()
    part.open()
    yield part
    part.close()


def bind(constraint, form):
    ((kind, source),) = form.items()
    grammar = make_grammar(kind, source, "grammar")
    return constraint.bind(Request("r", text="x", grammar=grammar), TARGET, False)


def test_a_mask_leaves_legal_scores_alone_and_forbids_the_rest(constraint):
    matcher = bind(constraint, {"regex": "[ab]c*"})
    scores = np.random.default_rng(1).normal(size=300).astype(np.float32)  # a padded vocabulary
    kept = scores.copy()
    legal = matcher.mask(scores)
    assert set(np.flatnonzero(np.isfinite(legal))) == {97, 98}
    assert (legal[97], legal[98]) == (scores[97], scores[98])
    matcher.push(97)
    assert set(np.flatnonzero(np.isfinite(matcher.mask(scores)))) == {99, 257}
    assert np.array_equal(scores, kept)


def test_asking_moves_nothing_and_restart_replays(constraint):
    matcher = bind(constraint, {"regex": "ab[cd]ef"})
    assert matcher.forced(9) == [97, 98]
    assert matcher.forced(1) == [97]
    assert matcher.legal([97, 98, 99, 101, 102]) == 5
    assert matcher.legal([97, 99]) == 1
    for token in b"abc":
        matcher.push(token)
    assert matcher.forced(9)[:2] == [101, 102]
    matcher.restart(b"ab")
    assert matcher.legal([100]) == 1
    for token in b"def":
        assert not matcher.done
        matcher.push(token)
    assert matcher.done
    with pytest.raises(RuntimeError):
        bind(constraint, {"regex": "ab"}).push(66)


def test_penalties_and_noise_see_only_legal_tokens(constraint):
    sampling = Sampling(temperature=1.0, top_p=0.5).over(NEUTRAL)
    row = Standard().bind(sampling, 3, [1], 2, bind(constraint, {"regex": "[xyz]{30}"}))
    scores = np.zeros(258, np.float32)
    scores[65] = 50.0
    drawn = []
    for position in range(30):
        token, logprob = row.draw(scores, position)
        assert row.draw(scores, position)[0] == token
        assert logprob.top[0][0] == 65
        row.push(token)
        drawn.append(token)
    assert row.matcher.done
    assert set(drawn) <= set(b"xyz")
    assert len(set(drawn)) > 1


def test_nothing_is_forbidden_while_the_model_thinks(constraint):
    marks = Marks((1,), (2,))
    scores = np.ones(258, np.float32)

    def allowed(matcher):
        return set(np.flatnonzero(np.isfinite(matcher.mask(scores))))

    thinking = AfterReasoning(bind(constraint, {"regex": "ab"}), marks, inside=True)
    assert len(allowed(thinking)) == 258
    assert thinking.legal([50, 51, 2, 97, 99]) == 4
    assert thinking.forced(4) == []
    for token in (50, 97, 2):
        thinking.push(token)
    assert (allowed(thinking), thinking.forced(4)) == ({97}, [97, 98])
    thinking.restart([50, 2, 97])
    assert (allowed(thinking), thinking.done) == ({98}, False)
    thinking.push(98)
    assert thinking.done

    fresh = AfterReasoning(bind(constraint, {"regex": "ab"}), marks, inside=False)
    assert allowed(fresh) == {1, 97}
    fresh.push(97)
    assert allowed(fresh) == {98}
    assert Marks.find(ByteTokens(None)) is None


def test_marks_of_several_tokens(constraint):
    """A first token that begins the mark is followed by its rest; the end may arrive in pieces."""
    scores = np.ones(258, np.float32)
    row = AfterReasoning(bind(constraint, {"regex": "ab"}), Marks((1, 50), (2, 51)), inside=False)
    assert row.legal([1, 50, 9, 2, 2, 51, 97, 99]) == 7
    assert row.legal([1, 51]) == 1
    for token, allowed in ((1, {50}), (50, None), (2, None), (2, None), (51, {97}), (97, {98})):
        row.push(token)
        legal = set(np.flatnonzero(np.isfinite(row.mask(scores))))
        assert legal == allowed or (allowed is None and len(legal) == 258)
    row.restart([1, 50, 2])
    assert row.legal([51, 97, 98]) == 3
    assert row.legal([7, 51, 97]) == 3


def test_a_budget_ends_the_reasoning():
    """After its tokens only the end's mark may come; drafts are legal as far; what follows is free."""
    scores, marks = np.ones(258, np.float32), Marks((1, 50), (2, 51))

    def allowed(matcher):
        return set(np.flatnonzero(np.isfinite(matcher.mask(scores))))

    inside = AfterReasoning(Free(), marks, inside=True, budget=2)
    assert inside.legal([9, 9, 9, 9]) == 2
    assert inside.legal([9, 9, 2, 51, 9, 9]) == 6
    assert inside.legal([9, 2, 2, 9]) == 2  # the second 2 would begin the mark anew
    assert inside.forced(4) == []
    for token, next_ in ((9, None), (8, {2}), (2, {51}), (51, None), (9, None)):
        inside.push(token)
        assert allowed(inside) == (next_ or set(range(258)))
    inside.restart([9, 8])
    assert inside.forced(4) == [2, 51]

    opening = AfterReasoning(Free(), marks, inside=False, budget=0)
    assert len(allowed(opening)) == 258
    assert opening.legal([1, 50, 2, 51, 7]) == 5
    assert opening.legal([1, 50, 7]) == 2
    assert opening.legal([1, 7, 7]) == 3  # no section after all, and the answer is free
    opening.push(1)
    assert len(allowed(opening)) == 258
    opening.push(50)
    assert allowed(opening) == {2}


def test_a_budget_holds_whatever_drafts(monkeypatch):
    monkeypatch.setattr(Marks, "find", lambda tokenizer: Marks((60,), (62,)))
    wanted = {"max_tokens": 24, "reasoning_budget": 5, "ignore_eos": True, "logit_bias": {62: -50}}
    answers = []
    speculative = ("flow=speculative", "drafter=ngram", "constraint=llguidance")
    wrong = ("flow=speculative", ORACLE, "+drafter.wrong_every=3")
    for overrides in (("flow=plain", "drafter=none"), speculative, wrong):
        with serving(*overrides) as engine:
            monkeypatch.setattr(type(engine.tokenizer.dialect), "opened", lambda *_: True)
            answers.append(engine.generate(prompt_ids(20), **wanted)["token_ids"])
    assert answers[0].index(62) == 5
    assert answers[0] == answers[1] == answers[2]


def test_a_budget_that_cannot_be_kept_is_refused():
    with serving() as engine, pytest.raises(RequestError, match="reasoning_budget"):
        engine.generate("hi", max_tokens=1, reasoning_budget=5)


DEEP = "rules or references may go"
OPEN = 'r{n}: [((("a" r{m})))]\n'  # in Lark these brackets hold what may be left out, no letters


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", "".join(OPEN.format(n=n, m=n + 1) for n in range(900))),
        ("lark", "start: %json " + '{"a":' * 5000 + "1" + "}" * 5000),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000),
    ],
)
def test_depth_that_hides_is_too_much(kind, source):
    """The first ended the process, the others were a 500."""
    assert too_much(make_grammar(kind, source, "grammar")).startswith(DEEP)


@pytest.mark.parametrize("kind", ["lark", "gbnf"])
@pytest.mark.parametrize("part", ["[", "/", '"', "[\\", "%json{} ", "a: /x "])
def test_what_never_closes_is_read_once(kind, part):
    """Followed to the line's end from each bracket, it held the whole server for hours."""
    began = time.perf_counter()
    too_much(make_grammar(kind, part * (1 << 16), "grammar"))
    assert time.perf_counter() - began < 5


def test_a_long_schema_beside_tools_is_not_read():
    wanted = {"tools": [], "must": False, "many": True, "answer": '{"a":' + "[" * SIZE}
    grammar = Grammar("tools", json.dumps(wanted), "guided_json")
    with pytest.raises(ValueError, match=f"it may have {SIZE} characters"):
        _in_its_words(grammar, SimpleNamespace(grammar=pytest.fail))


def test_schemas_of_real_sizes_are_not_too_much():
    models = {
        f"m{n}": {
            "type": "object",
            "properties": {
                "next": {"$ref": f"#/$defs/m{(n + 1) % 120}"},
                "name": {"type": "string"},
            },
        }
        for n in range(120)
    }
    tree = {"$defs": models, "$ref": "#/$defs/m0"}
    assert not too_much(make_grammar("json_schema", tree, "grammar"))
    assert not too_much(make_grammar("json_schema", {"$ref": "#"}, "grammar"))
    dates = {f"d{n}": {"type": "string", "format": "date"} for n in range(40)}
    wrapped = {"x": {"allOf": [{"$ref": "#/$defs/x"}], "title": "X"}}
    form = {"properties": {**dates, **wrapped}, "$defs": {"x": {"type": "string"}}}
    assert not too_much(make_grammar("json_schema", form, "grammar"))
    assert not too_much(make_grammar("gbnf", FORMS["gbnf"]["gbnf"], "grammar"))
    marks = "".join(f'r{n} ::= "((\\"&" [(&] r{n + 1}\n' for n in range(300))
    assert not too_much(make_grammar("gbnf", marks, "grammar"))
