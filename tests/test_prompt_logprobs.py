"""Log-probabilities of the prompt: what they mean, what they must not depend on, and the flow `score`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import ORACLE, prompt_ids, serving, together

from pipeline.errors import RequestError

PROMPT = prompt_ids(70)
PLAIN = ("flow=plain", "drafter=none")


def truth(engine, ids):
    """log-softmax (positions, V) of one forward without any cache."""
    model = engine.pipeline.parts["model"]

    def forward():
        logits = model.head(model.hidden(mx.array([ids]), None))[0]
        return np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    return engine.exclusive(forward)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def engine(request):
    with serving(f"model.family={request.param}", *PLAIN, "tier=ram") as engine:
        yield engine


def ask(engine, prompt=PROMPT, top=3, **wanted):
    return engine.generate(prompt, prompt_logprobs=top, ignore_eos=True, **wanted)


def test_they_are_the_models_own_before_any_sampling(engine):
    law = truth(engine, PROMPT)
    hot = {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.5, "logit_bias": {5: 3.0}}
    answer = ask(engine, max_tokens=2, **hot)
    first, *rest = answer["prompt_logprobs"]
    assert first is None and [e["token_id"] for e in rest] == PROMPT[1:]
    for at, entry in enumerate(rest):
        ordered = np.argsort(-law[at], kind="stable")
        assert entry["logprob"] == pytest.approx(law[at][PROMPT[at + 1]], abs=2e-4)
        assert [token for token, _ in entry["top"]] == ordered[:3].tolist()
        assert entry["rank"] == 1 + ordered.tolist().index(PROMPT[at + 1])
        assert entry["against"] is None


def test_chunks_and_neighbours_change_nothing(engine):
    whole = ask(engine, max_tokens=3)
    for chunk in (1, 7, 33):
        same(ask(engine, max_tokens=3, prefill_chunk=chunk), whole)
    mixed = together(engine, [PROMPT, prompt_ids(70, seed=4)], prompt_logprobs=3, max_tokens=3)
    same(mixed[0], whole)


def same(one, other):
    assert one["token_ids"] == other["token_ids"]
    pairs = zip(one["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True)
    for mine, theirs in pairs:
        assert mine["token_id"] == theirs["token_id"]
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=2e-4)
        assert [t for t, _ in mine["top"]] == [t for t, _ in theirs["top"]]


def test_few_positions_have_their_scores_at_one_time(engine, monkeypatch):
    model, own, widths = engine.pipeline.parts["model"], engine.pipeline.parts["model"].head, []
    monkeypatch.setattr(model, "head", lambda h: (widths.append(h.shape[1]), own(h))[1])
    ask(engine, max_tokens=0)
    assert sum(widths) == len(PROMPT) - 1 and max(widths) <= 32


def test_reuse_is_skipped_and_goes_on_for_others(engine):
    engine.generate(PROMPT, max_tokens=2, ignore_eos=True)
    scored = ask(engine, max_tokens=2)
    assert scored["cached_tokens"] == 0 and len(scored["prompt_logprobs"]) == len(PROMPT)
    again = engine.generate(PROMPT, max_tokens=2, ignore_eos=True)
    assert again["cached_tokens"] == len(PROMPT) - 1
    assert again["token_ids"] == scored["token_ids"] and "prompt_logprobs" not in again


def test_an_answer_of_no_tokens_scores_all_the_same(engine):
    calls = engine.stats()["counts"]["rounds"]
    answer = ask(engine, max_tokens=0)
    assert (answer["token_ids"], answer["finish_reason"]) == ([], "length")
    assert answer["completion_tokens"] == 0 and answer["prompt_tokens"] == len(PROMPT)
    assert len(answer["prompt_logprobs"]) == len(PROMPT)
    assert engine.stats()["counts"]["rounds"] == calls
    assert ask(engine, prompt=[5], max_tokens=0)["prompt_logprobs"] == [None]


def test_zero_best_gives_the_prompt_alone(engine):
    entry = ask(engine, top=0, max_tokens=0)["prompt_logprobs"][1]
    assert entry["top"] == () and entry["rank"] >= 1


@pytest.mark.parametrize("prefill", ["tail", "full"])
def test_a_drafter_and_lost_rows_change_nothing(prefill, monkeypatch):
    """A step that fails in mid-prompt costs the rows, not what was scored."""
    overrides = ("flow=speculative", ORACLE, f"+drafter.prefill={prefill}", "tier=none")
    with serving(*PLAIN, "tier=none") as plain, serving(*overrides) as engine:
        expected = ask(plain, max_tokens=6)
        same(ask(engine, max_tokens=6), expected)
        fail_once(engine, monkeypatch)
        same(ask(engine, max_tokens=6, prefill_chunk=16), expected)
        assert engine.stats()["counts"]["faults"] == 1


def fail_once(engine, monkeypatch):
    model, own, calls = engine.pipeline.parts["model"], engine.pipeline.parts["model"].hidden, []

    def hidden(tokens, caches):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a fault in the third chunk")
        return own(tokens, caches)

    monkeypatch.setattr(model, "hidden", hidden)


def test_scores_that_are_no_numbers_fail_their_row_alone(engine, monkeypatch):
    model, own = engine.pipeline.parts["model"], engine.pipeline.parts["model"].head
    monkeypatch.setattr(model, "head", lambda hidden: own(hidden) * float("nan"))
    with pytest.raises(FloatingPointError):
        ask(engine, max_tokens=0)
    monkeypatch.undo()
    assert len(ask(engine, max_tokens=2)["token_ids"]) == 2


def test_wrong_values_are_named(engine):
    for wrong in (-1, True, "3", 2.0):
        with pytest.raises(RequestError, match="prompt_logprobs: wants a whole number"):
            engine.generate(PROMPT, prompt_logprobs=wrong)


def score_flow(*overrides):
    return serving("flow=score", "drafter=none", "tier=none", *overrides)


def test_flow_score_decodes_nothing_and_compares_with_a_reference(tmp_path):
    with score_flow(f"stage.score.record={tmp_path}") as engine:
        first = ask(engine)
        assert first["finish_reason"] == "length" and first["token_ids"] == []
        assert first["prompt_logprobs"][1]["against"] is None
        law = truth(engine, PROMPT)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
    with score_flow(f"stage.score.reference={tmp_path}") as engine:
        for entry in ask(engine)["prompt_logprobs"][1:]:
            assert (entry["against"]["kl"], entry["against"]["agrees"]) == (0.0, True)
            assert entry["against"]["logprob"] == pytest.approx(entry["logprob"], abs=1e-6)
        with pytest.raises(RequestError, match="no reference of this text by tiny-llama"):
            ask(engine, prompt=PROMPT[:9])
        with pytest.raises(RequestError, match="ask for them"):
            engine.generate(PROMPT)
    doctor(next(tmp_path.iterdir()))
    with score_flow(f"stage.score.reference={tmp_path}") as engine:
        entries = ask(engine, prefill_chunk=11)["prompt_logprobs"][1:]
        other = engine.exclusive(lambda: doubled(engine, PROMPT))
    for at, entry in enumerate(entries):
        against = entry["against"]
        kl = float((np.exp(other[at]) * (other[at] - law[at])).sum())
        assert against["kl"] == pytest.approx(kl, abs=1e-4) and kl > 1e-3
        assert against["logprob"] == pytest.approx(other[at][PROMPT[at + 1]], abs=2e-4)
        assert against["agrees"] == (other[at].argmax() == law[at].argmax())


def doctor(path):
    """Another model's reference: hidden states twice as long, so a sharper law."""
    mx.save_safetensors(str(path), {"hidden": mx.load(str(path))["hidden"] * 2})


def doubled(engine, ids):
    model = engine.pipeline.parts["model"]
    logits = model.head(model.hidden(mx.array([ids]), None) * 2)[0]
    return np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
