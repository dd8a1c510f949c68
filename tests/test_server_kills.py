"""A serving process is killed at any instant: the next one serves, and only what is true.

`make test` kills 20 times; HEADRACE_KILLS=200 python -m pytest tests/test_server_kills.py more often.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import serving

ROOT = Path(__file__).parents[1]
KILLS = int(os.environ.get("HEADRACE_KILLS", "20"))
MODEL = ("model.layers=4", "drafter=none")
CAP = 1_200_000  # bytes; the index takes some
SMALL = ("tier=[ram,disk]", f"tier.disk.max_gb={CAP / 1e9}", "tier.disk.segment_tokens=16",
         "tier.disk.reserve_gb=0", "tier.ram.max_gb=0.00006", "tier.ram.entry_bytes=100",
         "stage.spill.debounce_s=0.01", "stage.spill.idle_s=0.2")  # fmt: skip
PROMPTS = [
    f"{'The mill stands by the river. ' * (1 + n % 3)}{'abcdefgh'[n % 8] * (20 + 13 * n)} end {n}?"
    for n in range(12)
]


def ask(port: int, prompt: str) -> tuple[str, int]:
    """The answer, and how many tokens came from saved state."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body["session_id"] = prompt[:3]
        connection.request("POST", "/v1/completions", json.dumps(body))
        reply = json.load(connection.getresponse())
    cached = reply["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return reply["choices"][0]["text"], cached


class Server:
    """A serving process on the folder."""

    def __init__(self, folder: Path):
        words = ["serve", "fake", *MODEL, *SMALL, f"tier.disk.path={folder}", "server.port=0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *words],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if b"serves" in line)
        self.port = int(line.rpartition(b":")[2])

    def trouble(self, rng: random.Random, wrong: list[str], answers: dict[str, str]) -> None:
        """Requests, and flushes in between, until nobody answers any more."""
        while True:
            try:
                if rng.random() < 0.2:
                    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                    connection.request("POST", "/admin/cache/flush")
                    connection.getresponse().read()
                    connection.close()
                    continue
                prompt = rng.choice(PROMPTS)
                text, _ = ask(self.port, prompt)
                if text != answers[prompt]:
                    wrong.append(prompt)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                return  # killed

    def kill(self) -> None:
        assert self.process.poll() is None, "it ended by itself"
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def answers():
    with serving(*MODEL, "tier=none", recipe="fake") as engine:
        wanted = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "raw": True}
        return {prompt: engine.generate(prompt, **wanted)["text"] for prompt in PROMPTS}


def test_a_server_killed_at_any_instant(tmp_path, answers):
    """During capture, spill, eviction, demotion, flush, and while it starts to collect."""
    rng, cached = random.Random(11), 0
    for kill in range(KILLS):
        server = Server(tmp_path)
        for prompt in rng.sample(PROMPTS, 2):
            text, known = ask(server.port, prompt)
            assert text == answers[prompt], f"after {kill} kills"
            cached += known
        wrong: list[str] = []
        clients = [
            threading.Thread(
                target=server.trouble, args=(random.Random(rng.random()), wrong, answers)
            )
            for _ in range(2)
        ]
        for client in clients:
            client.start()
        clients[0].join(rng.random() * 0.7)
        server.kill()
        for client in clients:
            client.join()
        assert wrong == []
        files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(files) <= CAP + 200_000, "what a killed writer left is counted and swept"
    assert cached > 10 * KILLS, "saved states were used"
    check_folder(tmp_path)


def check_folder(folder: Path) -> None:
    """Nothing in it is wrong, half written, or led to by nobody."""
    from test_disk_tier import files, opened

    tier = opened(folder, max_gb=CAP / 1e9)
    assert tier.store.verify() == {}
    assert {path.stem for path in files(folder)} == set(tier.store.shelf.files)
    assert not list(folder.rglob("*.tmp"))
    tier.check_integrity()
    tier.close()
