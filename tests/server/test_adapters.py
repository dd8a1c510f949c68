"""The field `adapter` in every family, and models that stand for one."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from adapter_folders import opened, written

from pipeline.server.local import SocketConnection
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hi"}]
FAMILIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}
ASKED = [
    ({}, None),
    ({"adapter": None}, None),
    ({"adapter": "none"}, ()),
    ({"adapter": ""}, ()),
    ({"adapter": []}, ()),
    ({"adapter": "sql"}, ("sql",)),
    ({"adapter": "sql+poet"}, ("sql", "poet")),
    ({"adapter": "poet,sql"}, ("poet", "sql")),
    ({"adapter": ["poet", "sql"]}, ("poet", "sql")),
    ({"model": "fake/one:sql"}, ("sql",)),
    ({"model": "fake/one:sql", "adapter": "none"}, ()),
    ({"model": "fake/one:other", "adapter": "poet"}, ("poet",)),
    ({"model": "other:tag"}, None),
    ({"model": "sql"}, None),
]


@pytest.mark.parametrize("path", FAMILIES)
def test_a_body_names_adapters_by_their_ids(engine, raw, path):
    for more, wanted in ASKED:
        status, _, reply = raw.post(path, {**FAMILIES[path], **more})
        assert status == 200, (more, reply)
        assert engine.requests[-1].adapter == wanted, more


@pytest.mark.parametrize("path", FAMILIES)
def test_a_model_whose_adapter_is_not_mounted_is_never_answered_without_it(engine, raw, path):
    status, _, reply = raw.post(path, {**FAMILIES[path], "model": "fake/one:sqll"})
    assert status == 400 and not engine.requests
    assert reply["error"]["message"].startswith("model: no such adapter is mounted; GET /v1/models")


@pytest.mark.parametrize("path", FAMILIES)
@pytest.mark.parametrize(
    "name", ["../sql", "/etc", "a/b", "sql+sql", "sql+none", "+", ".sql", {}, 1, [["sql"]]]
)
def test_what_can_be_no_id_is_refused(engine, raw, path, name):
    status, _, reply = raw.post(path, {**FAMILIES[path], "adapter": name})
    assert status == 400
    assert reply["error"]["message"].startswith("adapter: must be an id of an adapter")
    assert not engine.requests


def test_mounting_is_for_the_operator_and_by_names_on_the_shelf(tmp_path):
    folders = written(tmp_path)
    shelf = ("adapters.shelf=" + str(tmp_path), "flow=plain", "drafter=none", "tier=none")
    socket = str(tmp_path / "s")
    settings = ServerSettings(socket=socket)
    with opened("llama", {"a": folders["a"]}, *shelf) as engine, serve_in_thread(engine, settings):
        ask = partial(asked, socket)
        assert [one["id"] for one in ask("GET", "/admin/adapters")[1]["data"]] == ["a"]
        status, told = ask("POST", "/admin/adapters", {"id": "b", "scale": 0.5})
        assert (status, told["id"], told["folder"], told["scale"]) == (200, "b", "b", 0.5)
        assert [one["id"] for one in ask("GET", "/v1/models")[1]["data"]][1:] == [
            "tiny-llama:a",
            "tiny-llama:b",
        ]
        for folder in ("..", "../" + tmp_path.name, "/etc", str(tmp_path / "b"), "b/../a", "c"):
            status, told = ask("POST", "/admin/adapters", {"id": "x", "folder": folder})
            assert (status, told["error"]["param"]) == (400, "folder")
        chat = {"messages": MESSAGES, "max_tokens": 3, "adapter": "b"}
        assert ask("POST", "/v1/chat/completions", chat)[0] == 200
        assert ask("DELETE", "/admin/adapters/b") == (204, None)
        assert ask("DELETE", "/admin/adapters/b")[0] == 404
        status, told = ask("POST", "/v1/chat/completions", chat)
        assert (status, told["error"]["code"]) == (400, "adapter_not_found")
        assert "Mounted: a." in told["error"]["message"]


def test_many_who_mount_leave_a_thread_to_give_the_lease_back(tmp_path):
    """They wait for its end, each in a thread; its end needs one, too."""
    folders, socket = written(tmp_path), str(tmp_path / "s")
    shelf = ("adapters.shelf=" + str(tmp_path), "flow=plain", "drafter=none", "tier=none")
    settings = ServerSettings(socket=socket)
    with opened("llama", {"a": folders["a"]}, *shelf) as engine, serve_in_thread(engine, settings):
        lease = SocketConnection(socket, timeout=20)
        lease.request("POST", "/admin/lease")
        reply = lease.getresponse()
        while b"held" not in reply.readline():
            pass
        many = min(32, (os.cpu_count() or 1) + 4) + 2  # asyncio has so many threads but two
        with ThreadPoolExecutor(many) as pool:
            mounts = [pool.submit(asked, socket, "POST", "/admin/adapters", {"id": "b"})]
            mounts += [
                pool.submit(asked, socket, "DELETE", "/admin/adapters/b") for _ in range(many - 1)
            ]
            time.sleep(0.5)
            assert asked(socket, "GET", "/admin/adapters")[0] == 200
            reply.close()
            lease.close()
            found = [mount.result()[0] for mount in mounts]
    assert sorted(set(found)) in ([200, 204, 404], [200, 404])


def test_mounting_without_adapters_and_by_others(engine, raw):
    for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/sql")):
        assert raw.call(method, "/admin/adapters" + path)[0] == 403


def asked(socket, method, path, value=None):
    connection = SocketConnection(socket, timeout=20)
    connection.request(method, path, None if value is None else json.dumps(value))
    reply = connection.getresponse()
    status, body = reply.status, reply.read()
    connection.close()
    return status, json.loads(body) if body else None
