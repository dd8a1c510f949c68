"""A server killed with SIGKILL in mid-answer; the same request to the next one ends in the same text."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERY, CUT, LENGTH = 48, 110, 160
ASK = {"prompt": "The mill stands by the river.", "max_tokens": LENGTH, "temperature": 1.0,
       "ignore_eos": True, "logprobs": 2, "stream": True,
       "stream_options": {"include_usage": True}}  # fmt: skip


@contextlib.contextmanager
def server(folder, *more):
    """A serving process, slowed to 25 ms a pass, and its port."""
    words = ["serve", "fake", "flow=resumable", "model.layers=2", "model.delay_ms=25", *more,
             "tier=[ram,disk]", f"tier.disk.path={folder}", "tier.disk.reserve_gb=0",
             f"stage.progress_capture.checkpoint_tokens={EVERY}", "server.port=0"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if b"serves" in line)
        yield process, int(line.rpartition(b":")[2])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def stream(port, process=None):
    """(text, log-probabilities, usage); with a process: it is killed once `CUT` tokens are there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(ASK))
    reply, text, logprobs, usage = connection.getresponse(), "", [], {}
    assert reply.status == 200
    with contextlib.suppress(OSError, http.client.HTTPException):
        while line := reply.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
            if process is not None and len(logprobs) >= CUT:
                process.kill()
                break
    connection.close()
    return text, logprobs, usage


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_killed_in_mid_answer(tmp_path, drafter):
    chosen = (f"drafter={drafter}", "depth.max=2")
    with server(tmp_path, *chosen) as (process, port):
        head, said, _ = stream(port, process)
        assert process.wait() == -9
    with server(tmp_path, *chosen) as (_, port):
        text, logprobs, usage = stream(port)
        assert len(logprobs) == usage["completion_tokens"] == LENGTH
        assert text.startswith(head) and logprobs[: len(said)] == said
        assert usage["resumed_tokens"] >= len(said) - EVERY
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
