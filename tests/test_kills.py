"""Killed at any instant, the next start serves, and only what is true.

python -m pytest tests/test_kills.py runs 20 kills; `PYTHONPATH=.:tests python tests/test_kills.py 200` more.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from test_disk_tier import files, found, opened, written

from tests.truth import MIXES, capture

SPECS = MIXES["everything"]
ROOT = str(Path(__file__).parents[1])
SMALL = {"max_gb": 0.0012, "segment_tokens": 8}


def prompt(rng: random.Random) -> list[int]:
    """One of few, so that they share beginnings and evict each other."""
    return [rng.randrange(2) for _ in range(4)] + [rng.randrange(9)] * rng.randrange(4, 60)


def serve(folder: str, seed: int) -> None:
    """Put, restore, evict, collect, for ever."""
    rng = random.Random(seed)
    tier = opened(folder, **SMALL)
    print("ready", flush=True)
    while True:
        tokens = prompt(rng)
        tier.put(capture(SPECS, tokens))
        for _ in range(rng.randrange(12)):
            if tier.idle_step():
                tier.wait(0.002)
        assert found(tier, prompt(rng)) >= 0
        if rng.random() < 0.1:
            tier.store.evict_one()
        if rng.random() < 0.02:
            tier.close()
            tier = opened(folder, **SMALL)


def kill(folder: Path, count: int) -> int:
    """Kill a process `count` times, look after each; how many times something was restored."""
    rng, restored = random.Random(7), 0
    for seed in range(count):
        command = [sys.executable, __file__, "serve", str(folder), str(seed)]
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT}
        )
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        try:
            worker.wait(rng.random() * 0.3)
        except subprocess.TimeoutExpired:
            worker.kill()
        assert worker.wait() == -9, "it ended by itself"
        worker.stdout.close()
        tier = opened(folder, **SMALL)
        restored += sum(found(tier, prompt(rng)) > 0 for _ in range(20))
        assert not list(folder.rglob("*.tmp"))
        assert {p.stem for p in files(folder)} == set(tier.store.shelf.files), "an orphan stays"
        tokens = prompt(rng)
        tier.put(capture(SPECS, tokens))
        written(tier)
        assert tier.durable(tokens, "n")
        tier.close()
        assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= 1_300_000
    return restored


def test_twenty_kills(tmp_path):
    assert kill(tmp_path, 20) > 20


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as place:
            print(kill(Path(place), int(sys.argv[1])), "restored")
