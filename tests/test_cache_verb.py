"""`headrace cache`: what is there, whether it is right, and a running server asked to flush."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest
from support import prompt_ids, serving
from test_disk_tier import files, opened, written

from pipeline.cli import main
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from tests.truth import FULL, capture


@pytest.fixture
def folder(tmp_path):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(30)))
    tier.put(capture((FULL,), [*range(8), 5, 5], "another"))
    written(tier)
    tier.close()
    return tmp_path


def cache(action, folder):
    words = ["fake", "tier=[ram,disk]", f"tier.disk.path={folder}", "tier.disk.reserve_gb=0"]
    return main(["cache", action, *words])


def test_ls_counts_by_namespace(folder, capsys):
    assert cache("ls", folder) == 0
    said = capsys.readouterr().out
    assert "namespace another  files 2  tokens 10" in said
    assert "namespace n  files 4  tokens 30" in said


def test_verify_removes_what_is_wrong(folder, capsys):
    assert cache("verify", folder) == 0
    assert "6 files are right, 0 were not" in capsys.readouterr().out
    path = files(folder)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cache("verify", folder) == 1
    assert "a checksum differs" in capsys.readouterr().out
    assert not path.exists()
    assert cache("gc", folder) == 0


def test_no_disk_tier_is_said(capsys):
    assert main(["cache", "ls", "fake"]) == 2
    assert "tier=[ram,disk]" in capsys.readouterr().err


def test_a_flush_over_http_tells_the_truth(tmp_path):
    disk = ("tier=[ram,disk]", f"tier.disk.path={tmp_path}", "tier.disk.reserve_gb=0")
    with serving(*disk) as engine, serve_in_thread(engine, ServerSettings(port=0)) as url:
        engine.generate(prompt_ids(40), max_tokens=4)
        assert flush(url)[0] == 200
        status, report = flush(url)
        assert (status, report["durable"], report["missing"]) == (200, True, 0)
        assert engine.stats()["spill"]["dirty"] == 0
        engine.pipeline.parts["tier"][1].store.reserve = 1 << 60
        engine.generate(prompt_ids(40, seed=3), max_tokens=4)
        status, report = flush(url)
        assert (status, report["durable"]) == (503, False)
        assert report["failed"] >= 1
        engine.pipeline.parts["tier"][1].store.reserve = 0
        status, report = flush(url)
        assert (status, report["durable"]) == (200, True), "what failed stayed dirty"


def flush(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("POST", "/admin/cache/flush")
    reply = connection.getresponse()
    return reply.status, json.load(reply)
