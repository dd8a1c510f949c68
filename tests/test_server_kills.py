"""A serving process is killed at any instant: the next one serves, and only what is true.

`make test` kills 20 times; HEADRACE_KILLS=200 python -m pytest tests/test_server_kills.py more often.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import serving

from pipeline.server.local import SocketConnection

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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    with contextlib.closing(connection):
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body["session_id"] = prompt[:3]
        connection.request("POST", "/v1/completions", json.dumps(body))
        reply = json.load(connection.getresponse())
    cached = reply["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return reply["choices"][0]["text"], cached


@contextlib.contextmanager
def forking():
    """The process that starts the servers."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "forked_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        yield process
        process.stdin.close()  # it ends


class Server:
    """A serving process on the folder."""

    def __init__(self, forker: subprocess.Popen, folder: Path):
        self.admin = f"{folder}.socket"  # a killed server leaves it: the next one replaces it
        words = ["serve", "fake", *MODEL, *SMALL, f"tier.disk.path={folder}", "server.port=0"]
        words.append(f"server.socket={self.admin}")
        self.folder, self.says = folder, forker.stdout
        forker.stdin.write(json.dumps(words) + "\n")
        forker.stdin.flush()
        self.pid = int(self.says.readline())
        self.port = int(self._until("serves").rpartition(":")[2])

    def _until(self, word: str) -> str:
        for line in self.says:
            assert word == "ended" or line != "ended\n", "it ended by itself"
            if word in line:
                return line
        raise AssertionError("the process that starts servers has ended")

    def trouble(self, rng: random.Random, wrong: list[str], answers: dict[str, str]) -> None:
        """Requests, and flushes in between, until nobody answers any more."""
        while True:
            try:
                if rng.random() < 0.2:
                    connection = SocketConnection(self.admin)
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
        """ProcessLookupError if it has ended by itself."""
        os.kill(self.pid, signal.SIGKILL)
        self._until("ended")


@pytest.fixture(scope="module")
def answers():
    with serving(*MODEL, "tier=none", recipe="fake") as engine:
        wanted = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "raw": True}
        return {prompt: engine.generate(prompt, **wanted)["text"] for prompt in PROMPTS}


def test_a_server_killed_at_any_instant(tmp_path, answers):
    """During capture, spill, eviction, demotion, flush, and while it starts to collect."""
    rng = random.Random(11)
    with forking() as forker:
        cached = sum(killed(Server(forker, tmp_path), rng, answers) for _ in range(KILLS))
        assert cached > 10 * KILLS, "saved states were used"
        check_folder(tmp_path)


def killed(server: Server, rng: random.Random, answers: dict[str, str]) -> int:
    """What the one before left serves, then this one is killed too; how many tokens were used of it."""
    cached, wrong, clients = 0, [], []
    try:
        for prompt in rng.sample(PROMPTS, 2):
            text, known = ask(server.port, prompt)
            assert text == answers[prompt]
            cached += known
        for _ in range(2):
            arguments = (random.Random(rng.random()), wrong, answers)
            clients.append(threading.Thread(target=server.trouble, args=arguments))
            clients[-1].start()
        clients[0].join(rng.random() * 0.7)
    finally:
        server.kill()
    for client in clients:
        client.join()
    assert wrong == []
    files = [path.stat().st_size for path in server.folder.rglob("*") if path.is_file()]
    assert sum(files) <= CAP + 200_000, "what a killed writer left is counted and swept"
    return cached


def check_folder(folder: Path) -> None:
    """Nothing in it is wrong, half written, or led to by nobody."""
    from test_disk_tier import files, opened

    tier = opened(folder, max_gb=CAP / 1e9)
    assert tier.store.verify() == {}
    assert {path.stem for path in files(folder)} == set(tier.store.shelf.files)
    assert not list(folder.rglob("*.tmp"))
    tier.check_integrity()
    tier.close()
