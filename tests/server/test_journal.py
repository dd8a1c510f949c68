"""The log: a line of JSON a request, and ids that clients give."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time

import pytest

from pipeline.errors import ConfigError
from pipeline.server import journal
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.types import Accepted, Delta, Failed

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "my secret"}]}


@pytest.fixture
def lines(caplog):
    """The log's lines so far, as they would stand there."""
    caplog.set_level(logging.INFO, "headrace.requests")
    text = journal.Lines()

    def read(count=1):
        for _ in range(200):
            found = [
                text.format(record)
                for record in caplog.records
                if record.name == "headrace.requests"
            ]
            if len(found) >= count:
                break
            time.sleep(0.01)
        caplog.clear()
        assert all("\n" not in line and line.isascii() for line in found)
        return [json.loads(line) for line in found]

    return read


def test_a_line_a_request(engine, raw, lines):
    for stream in (False, True):
        raw.call("POST", CHAT, json.dumps({**ASK, "stream": stream}).encode())
        (line,) = lines()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert (line["event"], line["route"], line["status"], line["key"]) == (
            "request",
            CHAT,
            200,
            "",
        )
        assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (
            5,
            8,
            3,
        )
        assert (line["finish_reason"], line["stream"], line["id"]) == (
            "stop",
            stream,
            line["answer"],
        )
        assert 0 <= line["ttft_s"] <= line["seconds"] < 5
        assert "secret" not in str(line)


def test_lines_of_what_went_wrong(engine, raw, lines):
    pieces = [step for _ in range(3) for step in (0.05, Delta("ab", (1, 2)))]
    engine.plan = lambda _: [Accepted(1), *pieces, Failed(RuntimeError("inner secret"))]
    raw.call("POST", CHAT, json.dumps({**ASK, "stream": True}).encode())
    (line,) = lines()
    assert (line["status"], line["error"], line["finish_reason"]) == (
        200,
        "internal_error",
        "failed",
    )
    raw.call("POST", CHAT, b'{"messages": "my secret"}')
    raw.call("GET", "/%0d%0a" + "x" * 500)
    wrong, lost = lines(2)
    assert (wrong["status"], wrong["error"]) == (400, "invalid_type")
    assert (lost["status"], lost["error"], len(lost["route"])) == (404, "not_found", 200)
    assert "secret" not in str([line, wrong])


def test_who_hangs_up_is_in_the_log(engine, client, lines):
    engine.plan = lambda _: [Accepted(1), Delta("a", (1,)), 30.0]
    with client.chat.completions.create(model="m", **ASK, stream=True) as stream:
        next(iter(stream))
    (line,) = lines()
    assert (line["finish_reason"], line["completion_tokens"]) == ("client gone", 1)


def test_prompts_only_if_they_are_wanted(script, lines):
    with serve_in_thread(script.Engine(), ServerSettings(log_prompts=True)) as base:
        script.Raw(base).post(CHAT, ASK)
    (line,) = lines()
    assert line["prompts"] == [ASK["messages"]]
    assert line["answers"] == [script.TEXT]


def test_ids(engine, raw, lines):
    """A client's own, if it is a plain word; else the answer's, or a new one. The same in header and log."""
    for given in ("my-id.1", "a" * 128):
        _, headers, _ = raw.call("POST", CHAT, json.dumps(ASK).encode(), **{"x-request-id": given})
        assert headers["x-request-id"] == headers["request-id"] == given == lines()[0]["id"]
    for given in ("", "a b", "../x", "a\tb", "é", "a" * 129, "{}", "-x"):
        _, headers, reply = raw.call(
            "POST", CHAT, json.dumps(ASK).encode(), **{"x-request-id": given}
        )
        assert headers["x-request-id"] == json.loads(reply)["id"] == lines()[0]["id"]
    for path, status in (("/health", 200), ("/nope", 404)):
        got, headers, _ = raw.call("GET", path)
        assert got == status and re.fullmatch("req_[0-9a-f]{32}", headers["x-request-id"])
        assert headers["request-id"] == lines()[0]["id"]


def test_the_log_is_a_file_of_the_owners(tmp_path):
    file, root = tmp_path / "log.jsonl", logging.getLogger()
    before, level = root.handlers, root.level
    root.handlers = []
    try:
        journal.begin(str(file))
        logging.getLogger("headrace.server").warning("a\nb %s", "\u2028")
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("headrace.server").exception("failed")
        file.rename(tmp_path / "old.jsonl")
        logging.getLogger("headrace.server").warning("after the move")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
        root.setLevel(level)
    first, second = map(json.loads, (tmp_path / "old.jsonl").read_text().splitlines())
    assert first["message"] == "a\nb \u2028" and "ValueError: x" in second["exception"]
    assert "after the move" in file.read_text()
    assert stat.S_IMODE(os.stat(tmp_path / "old.jsonl").st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"server\.log"):
        journal.begin(str(tmp_path / "none" / "log"))
