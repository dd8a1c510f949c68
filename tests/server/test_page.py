"""The page's files and its stream, without a browser."""

from __future__ import annotations

import http.client
import json
import threading
import time
from contextlib import closing
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

import pipeline
from pipeline.portrait import portrait
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

OVERRIDES = ("depth.max=4", "limits.max_rows=3", "tier.ram.max_gb=0.5")


@pytest.fixture(scope="module")
def real():
    with (
        pipeline.load("fake", *OVERRIDES) as engine,
        serve_in_thread(engine, ServerSettings(shutdown_s=1)) as base,
    ):
        yield engine, base


@pytest.fixture
def raw(real, script):
    return script.Raw(real[1])


class Viewer:
    """Somebody who looks at /events."""

    def __init__(self, base):
        self.connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=10)
        self.connection.request("GET", "/events")
        self.reply = self.connection.getresponse()

    def close(self):
        self.reply.close()
        self.connection.close()

    def next(self):
        event = self.reply.readline().decode().removeprefix("event: ").strip()
        data = json.loads(self.reply.readline().decode().removeprefix("data: "))
        assert self.reply.readline() == b"\n"
        return event, data


def test_the_files_hold_no_data_and_may_load_nothing_from_elsewhere(raw):
    for path in ("/", "/page/app.js", "/page/style.css", "/page/vendor/uPlot.iife.min.js"):
        status, headers, body = raw.call("GET", path)
        assert status == 200, path
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "'unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert b"fake" not in body or path.endswith("min.js")
        tag = headers["etag"]
        assert raw.call("GET", path, None, **{"if-none-match": tag})[0] == 304
    assert b"MIT License" in raw.call("GET", "/page/vendor/uPlot.LICENSE.txt")[2]


@pytest.mark.parametrize("path", ["/page/../assets.py", "/page/%2e%2e/assets.py", "/page/nothing"])
def test_there_is_no_way_out_of_the_folder(raw, path):
    status, _, body = raw.call("GET", path)
    assert status == 404
    assert json.loads(body)["error"]["code"] == "not_found"


def test_a_viewer_is_told_what_is_served_and_then_the_figures(real, raw):
    with closing(Viewer(real[1])) as viewer:
        assert viewer.reply.headers["content-type"].startswith("text/event-stream")
        event, served = viewer.next()
        assert event == "pipeline" and served["recipe"] == served["model"] == "fake"
        decode = next(p for p in served["graph"]["phases"] if p["name"] == "decode")
        assert decode["stages"][0]["stage"] == "draft" and decode["loop"]
        assert served["graph"]["about"]["draft"] == "Ask the drafter what may come next."
        event, before = viewer.next()
        assert event == "figures" and before["rows"]["active"] == 0
        ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150}
        assert raw.post("/v1/chat/completions", ask)[0] == 200
        _, after = viewer.next()
    runs = after["phases"]["decode"]["verify"]["runs"]
    assert after["counts"]["rounds"] == runs > 0
    assert after["counts"]["emitted_tokens"] == 150
    assert {"admit", "prefill", "decode", "finish"} <= set(after["phases"])
    assert len(after["drafted_by_position"]) == 4
    assert sum(after["accepted_by_position"]) == after["counts"]["accepted"] > 0


def test_all_viewers_share_one_look_a_second_and_without_them_nobody_looks(real, monkeypatch):
    engine, base = real
    looks = []
    stats = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: looks.append(time.monotonic()) or stats())
    viewers = [Viewer(base) for _ in range(4)]
    seen = [[] for _ in viewers]

    def look(viewer, into):
        into += [viewer.next() for _ in range(4)]

    threads = [threading.Thread(target=look, args=pair) for pair in zip(viewers, seen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for viewer in viewers:
        viewer.close()
    assert 3 <= len(looks) <= 4
    assert all(b - a > 0.95 for a, b in pairwise(looks))
    assert len({data["at"] for one in seen for event, data in one if event == "figures"}) <= 4
    time.sleep(1.2)  # the look that was under way when the last one left
    count = len(looks)
    time.sleep(1.5)
    assert len(looks) == count


def test_the_stream_ends_with_the_engine():
    with (
        pipeline.load("fake") as engine,
        serve_in_thread(engine, ServerSettings(shutdown_s=1)) as base,
        closing(Viewer(base)) as viewer,
    ):
        viewer.next(), viewer.next()
        engine.close()
        assert viewer.next()[1]["state"] == "closed"
        assert viewer.reply.read() == b""


def test_a_portrait_says_who_chose_and_keeps_secrets(monkeypatch, tmp_path):
    from pipeline.build import build
    from pipeline.compose import compose
    from pipeline.plan import plan

    monkeypatch.setenv("PLACE", "/a/secret/place")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [base, override tier: [ram, disk], _self_]\ndepth: {max: 3}\n")
    overrides = ["tier.disk.path=${oc.env:PLACE}", "limits.max_rows=2", "drafter=ngram"]
    overrides += ["flow=speculative", "model.name=sk-0123456789abcdef"]
    found = portrait(build(plan(compose(str(recipe), overrides))))
    chosen = {one["group"]: one for one in found["choices"]}
    assert (chosen["tier"]["options"], chosen["tier"]["by"]) == (["ram", "disk"], "recipe mine")
    assert (chosen["drafter"]["by"], chosen["kv"]["by"]) == ("command line", "base")
    assert "memory" in chosen["tier"]["about"][0] and "disk" in chosen["tier"]["about"][1]
    said = {one["path"]: (one["value"], one["from"]) for one in found["settings"]}
    assert said["depth.max"] == (3, "recipe mine")
    assert said["limits.max_rows"] == (2, "command line")
    assert said["tier.ram.max_gb"][1] == "tier=ram"
    assert said["stage.spill.idle_s"][1] == "stage/spill.yaml"
    assert said["tier.disk.path"] == ("${oc.env:PLACE}", "environment ${oc.env:PLACE}")
    assert said["model.name"][0] == "???"
    json.dumps(found)
