"""What cannot draft is an error before anything is served, and says what to type."""

from __future__ import annotations

import re

import pytest
from neural import GOLDEN
from support import serving

from pipeline.build import build
from pipeline.compose import compose
from pipeline.errors import ConfigError, GraphError, OpenError
from pipeline.plan import plan


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["drafter=ngram", "drafter.path=some_folder"],
            "drafter.path: drafter=ngram takes no 'path'. Choose what takes it: drafter=assistant, drafter=auto,",
        ),
        (["drafter=eagle"], "drafter: has no option 'eagle'. Did you mean 'eagle3'?"),
        (["drafter=eagle3"], "drafter.path: must be set. Add drafter.path=VALUE"),
        (
            ["drafter=suffix", "depth=confidence"],
            "depth=confidence: needs drafter to grade, but drafter=suffix can only adapters and external and "
            "refill. Choose drafter=",
        ),
        (
            ["drafter=grammar", "constraint=none"],
            "drafter=grammar: needs constraint to force, but constraint=none can do nothing of the "
            "kind. Choose constraint=llguidance.",
        ),
        (["drafter=suffix", "drafter.remember=9"], "drafter.remember: wants 0 (nothing) or >= 256"),
        (["drafter=two_model"], "draft_model"),
    ],
)
def test_before_anything_is_opened(words, says):
    with pytest.raises((ConfigError, GraphError), match=re.escape(says)):
        build(plan(compose("tiny", words)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["drafter=auto", f"drafter.path={GOLDEN}"], r"holds no config\.json"),
        (
            ["drafter=eagle3", f"drafter.path={GOLDEN / 'eagle3_safeai'}"],
            r"made for 96, tiny-llama has 192",
        ),
        (["drafter=mtp"], r"drafter\.path"),
    ],
)
def test_when_it_is_opened(words, says):
    with pytest.raises(OpenError, match=says), serving("flow=speculative", *words):
        pass
