"""What coded policies cost a real model (SmolLM2): KL against native on a text of ours."""

from __future__ import annotations

import mlx.core as mx
import pytest
from targets import Cpu, opened

from pipeline.lab import texts
from stages.kv.affine import Affine
from stages.kv.native import Native
from stages.kv.per_layer import PerLayer
from stages.kv.rotated import Rotated
from stages.kv.turboquant import TurboQuant

TOKENS, CHUNK = 192, 64


def log_probabilities(policy, target, ids):
    rows = opened(policy).rows(target, 9)
    rows.prepare_append([None]).commit()
    scores = []
    for start in range(0, len(ids), CHUNK):
        fed = ids[start : start + CHUNK]
        round = rows.begin([fed])
        scores.append(target.head(target.hidden(round.tokens_BW, round.caches))[0])
        round.launch(scores[-1])
        round.resolve([len(fed)])
    whole = mx.concatenate(scores)
    return whole - mx.logsumexp(whole, -1, keepdims=True)


@pytest.mark.real
def test_divergence_from_native_keeps_the_promised_bounds():
    from stages.models.smollm2 import Smollm2

    target = opened(Smollm2(Cpu()))
    ids = target.tokenizer.encode(texts.read("mill"))[:TOKENS]
    native = log_probabilities(Native(), target, ids)

    def divergence(policy):
        coded = log_probabilities(policy, target, ids)
        return (mx.exp(native) * (native - coded)).sum(-1).mean().item()

    kv8, k8v3, kv4 = map(divergence, (Affine(), TurboQuant(), Affine(bits=4)))
    assert 0 < kv8 <= 0.01
    assert kv8 < k8v3 < kv4 <= 0.3
    assert divergence(Rotated()) < kv4
    assert kv8 < divergence(PerLayer(map="smollm2")) < kv4
    target.close()
