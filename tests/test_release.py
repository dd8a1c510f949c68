"""Memory goes back to the system once nothing has run for a while, and not before."""

from __future__ import annotations

import time
from types import SimpleNamespace

from support import prompt_ids, serving

from stages.release import Release


def test_after_a_while_without_work_once():
    released = []
    target = SimpleNamespace(calls=0)
    stage = Release(SimpleNamespace(release=lambda: released.append(1)), target, idle_s=0.05)
    stage.run(None)
    assert (stage.again_s, released) == (None, [])  # nothing has run yet
    target.calls = 3
    stage.run(None)
    assert (stage.again_s, released) == (0.05, [])
    stage.run(None)
    assert 0 < stage.again_s <= 0.05 and not released
    time.sleep(0.06)
    stage.run(None)
    stage.run(None)
    assert (stage.again_s, released) == (None, [1])


def test_an_engine_at_rest(monkeypatch):
    with serving("flow=plain", "drafter=none", "stage.release.idle_s=0.1") as engine:
        released = []
        device = engine.pipeline.parts["device"]
        monkeypatch.setattr(device, "release", lambda: released.append(time.monotonic()))
        engine.generate(prompt_ids(600), max_tokens=2)
        ended = time.monotonic()
        time.sleep(0.4)
        assert len(released) == 1 and released[0] >= ended
