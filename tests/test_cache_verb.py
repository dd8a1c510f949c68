"""`headrace cache`: what is there, whether it is right, and a running server asked to flush."""

from __future__ import annotations

import http.client
import json
import re
from urllib.parse import urlsplit

import pytest
from support import prompt_ids, serving
from test_disk_tier import files, opened, written

from pipeline.cli import main
from pipeline.server.local import SocketConnection
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


def test_ls_shows_prefixes_and_how_often_they_were_used(tmp_path, capsys):
    tier = opened(tmp_path)
    for last in (7, 8):
        tier.put(capture((FULL,), [*range(16), *[last] * 4]))
    written(tier)
    for _ in range(3):
        tier.lookup([*range(16), *[8] * 4, 1], "n", 20)
    tier.close()
    assert cache("ls", tmp_path) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("namespace n  files 4  tokens 24  bytes ")
    assert said[1].endswith("prefixes 2  hits 3")
    assert said[2].startswith("  20 tokens, 4 its own, ")
    assert said[2].endswith("hits 3: ids 0 1 2 3 4 5 6 7 …")
    assert said[3].endswith("hits 0: ids 0 1 2 3 4 5 6 7 …")


PROMPTS = """\
Why does a mill need a river?
{"messages": [{"role": "system", "content": "You are a miller."}, {"role": "user", "content": "Hi"}]}

{"prompt": "The mill stands by the river and its wheel"}
"""


def test_warm_computes_prompts_that_a_server_then_starts_from(tmp_path, capsys):
    (tmp_path / "prompts").write_text(PROMPTS)
    place = (f"tier.disk.path={tmp_path / 'states'}", "tier.disk.reserve_gb=0")
    words = ["tiny", str(tmp_path / "prompts"), "tier=[ram,disk]", *place]
    assert main(["cache", "warm", *words]) == 0
    said = capsys.readouterr()
    assert "3 prompts of " in said.out
    assert "computing prompts" in said.err
    assert main(["cache", "warm", *words]) == 0
    tokens, known = re.findall(
        r"prompts of (\d+) tokens, (\d+) of them known", capsys.readouterr().out
    )[0]
    assert int(known) == int(tokens) - 3, "a prompt's last token is always computed"
    with serving("tier=[ram,disk]", *place) as engine:
        got = engine.generate(
            "The mill stands by the river and its wheel turns", raw=True, max_tokens=4
        )
        assert got["cached_tokens"] > 30
        assert engine.stats()["tiers"]["disk"]["hits"] == 1
        chat = engine.generate("Why does a mill need a river?", max_tokens=4)
        assert chat["cached_tokens"] > 20


def test_warm_says_what_it_cannot_take(tmp_path, capsys):
    prompts = tmp_path / "prompts"
    prompts.write_text('{"messages": [{"text": "x"}]}\nfine\n{"prompt": 3}\n')
    words = ["cache", "warm", "fake", "tier=[ram,disk]", f"tier.disk.path={tmp_path / 's'}"]
    assert main([*words, str(prompts)]) == 2
    said = capsys.readouterr().err
    assert "prompts:1: wants" in said and "prompts:3: wants" in said and "prompts:2" not in said
    assert main(words) == 2
    assert "wants one FILE" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    prompts.write_text("x" * 9000 + "\nshort\n")
    assert main([*words, "tier.disk.reserve_gb=0", str(prompts)]) == 1
    assert "line 1: the prompt has" in capsys.readouterr().out


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
    admin = tmp_path / "admin"
    settings = ServerSettings(socket=str(admin))
    with serving(*disk) as engine, serve_in_thread(engine, settings):
        engine.generate(prompt_ids(40), max_tokens=4)
        assert flush(admin)[0] == 200
        assert main(["cache", "flush", "fake", f"server.socket={admin}"]) == 0
        status, report = flush(admin)
        assert (status, report["durable"], report["missing"]) == (200, True, 0)
        assert engine.stats()["spill"]["dirty"] == 0
        engine.pipeline.parts["tier"][1].store.reserve = 1 << 60
        engine.generate(prompt_ids(40, seed=3), max_tokens=4)
        status, report = flush(admin)
        assert (status, report["durable"]) == (503, False)
        assert report["failed"] >= 1
        engine.pipeline.parts["tier"][1].store.reserve = 0
        status, report = flush(admin)
        assert (status, report["durable"]) == (200, True), "what failed stayed dirty"


def test_a_session_is_closed_over_http():
    with serving("tier=ram") as engine, serve_in_thread(engine, ServerSettings(port=0)) as url:
        engine.generate(prompt_ids(40), max_tokens=4, session_id="a/b c")
        assert engine.stats()["tiers"]["ram"]["sessions"] == 1
        for name in ("a/b%20c", "unknown"):
            assert send(url, "DELETE", f"/v1/sessions/{name}").status == 204
        engine.generate(prompt_ids(40, seed=3), max_tokens=4, session_id="other")
        assert engine.stats()["tiers"]["ram"]["sessions"] == 1


def send(url, method, path):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request(method, path)
    return connection.getresponse()


def flush(path):
    connection = SocketConnection(path)
    connection.request("POST", "/admin/cache/flush")
    reply = connection.getresponse()
    return reply.status, json.load(reply)
