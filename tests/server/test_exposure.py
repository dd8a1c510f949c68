"""Where a server can be reached, and from which pages: ports, Unix sockets, host names, origins, sizes."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from urllib.parse import urlsplit

import pytest

from pipeline.cli import main
from pipeline.errors import ConfigError, OpenError
from pipeline.server.listening import listening
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}
FLUSH = "/admin/cache/flush"
PAGE = "https://app.example.org"


@pytest.fixture(scope="module")
def open_to_pages(script, tmp_path_factory):
    engine, path = script.Engine(), tmp_path_factory.mktemp("s") / "socket"
    settings = ServerSettings(cors=[PAGE], hosts=["Box.lan"], socket=str(path), body_s=0.5)
    with serve_in_thread(engine, settings) as base:
        yield engine, script.Raw(base), script.Raw(path=str(path)), path


def said(raw, data, until):
    """What comes back on a connection of its own, until this is in it."""
    host, port = raw.address.split(":")
    reply = b""
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(data)
        while until not in reply and (more := sock.recv(65536)):
            reply += more
    return reply


# --- where


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "example.org"])
def test_a_public_address_needs_keys(host):
    with pytest.raises(ConfigError) as refused:
        ServerSettings(host=host)
    assert "headrace key NAME" in str(refused.value) and "server.keys=FILE" in str(refused.value)
    ServerSettings(host=host, keys="file")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_needs_none(host):
    ServerSettings(host=host)


def test_pages_and_hosts_are_checked():
    for cors in (["*"], ["app.example.org"], ["https://a/b"]):
        with pytest.raises(ConfigError, match=r"server\.cors"):
            ServerSettings(cors=cors)
    ServerSettings(cors=["*"], keys="file")


# --- Unix socket


def test_the_socket_is_its_owners_only(open_to_pages):
    mode = os.lstat(open_to_pages[3]).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_the_socket_answers_and_has_admin(open_to_pages):
    _, port, local, _ = open_to_pages
    for raw in (port, local):
        assert raw.call("POST", CHAT, json.dumps(ASK).encode())[0] == 200
    assert local.call("POST", FLUSH)[0] == 200
    status, _, reply = port.call("POST", FLUSH)
    assert (status, json.loads(reply)["error"]["code"]) == (403, "forbidden")
    for header in ("x-forwarded-for", "x-real-ip", "forwarded"):
        assert port.call("POST", FLUSH, **{header: ""})[0] == 403


def test_who_has_hung_up_is_no_operator(open_to_pages):
    """A peer that is gone has no address, like one on a Unix socket."""
    engine, port, _, _ = open_to_pages
    flushed = []
    engine.flush = lambda: flushed.append(1) or {"durable": True}
    host, number = port.address.split(":")
    for _ in range(20):
        sock = socket.create_connection((host, int(number)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(
            f"POST {FLUSH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
        )
        sock.close()
    assert port.call("GET", "/health")[0] == 200
    assert not flushed


def test_a_stale_socket_is_replaced_and_the_end_removes_it(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening("127.0.0.1", 0, str(path)) as listeners:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(OpenError, match="another server"), listening("127.0.0.1", 0, str(path)):
            pass
        assert len(listeners) == 2 and path.exists()
    assert os.listdir(tmp_path) == []


def test_an_address_that_is_taken_is_said_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.cli.served.Engine", None)  # nothing may be opened
    path, file = str(tmp_path / "socket"), tmp_path / "file"
    file.write_text("mine")
    with listening("127.0.0.1", 0, path) as (port, _):
        taken = port.getsockname()[1]
        for settings, told in (
            ([f"server.port={taken}"], "in use. Try: server.port="),
            (["server.port=0", f"server.socket={path}"], "another server"),
            (["server.port=0", f"server.socket={file}"], "is no socket"),
            (
                ["server.port=0", f"server.socket={tmp_path}/none/socket"],
                "No such file or directory",
            ),
        ):
            assert main(["serve", "fake", *settings]) == 2
            assert told in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_another_port_that_is_named_is_free():
    with listening("127.0.0.1", 0, None) as (port,):
        with pytest.raises(OpenError) as refused, listening(*port.getsockname(), None):
            pass
        other = int(str(refused.value).rpartition("=")[2])
        with listening("127.0.0.1", other, None) as (found,):
            assert found.getsockname()[1] == other > 1023
    with (
        pytest.raises(OpenError, match=r"Try another server\.host"),
        listening("192.0.2.1", 80, None),
    ):
        pass  # an address that no machine has


def test_what_is_not_ours_is_left_alone(tmp_path):
    file, link, path = tmp_path / "file", tmp_path / "link", tmp_path / "socket"
    file.write_text("mine")
    link.symlink_to(file)
    for place in (file, link, tmp_path / "none" / "socket", tmp_path / ("x" * 200)):
        with pytest.raises(OpenError, match="cannot listen"), listening("127.0.0.1", 0, str(place)):
            pass
    assert file.read_text() == "mine"
    with listening("127.0.0.1", 0, str(path)):
        path.unlink()
        with listening("127.0.0.1", 0, str(path)):
            pass
        path.write_text("another's by now")
    assert path.read_text() == "another's by now"


# --- pages


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:80", "[::1]:80", "box.LAN:80", "a.localhost"]
)
def test_names_it_is_asked_by(open_to_pages, host):
    assert open_to_pages[1].call("GET", "/v1/models", host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "0.0.0.0",
        "box.lan.evil",
        "[evil]",
    ],
)
def test_rebound_names_are_refused(open_to_pages, host):
    engine, raw, local, _ = open_to_pages
    engine.requests.clear()
    status, _, reply = raw.call("POST", CHAT, json.dumps(ASK).encode(), host=host)
    assert (status, json.loads(reply)["error"]["code"]) == (403, "forbidden_host")
    assert "server.hosts" in json.loads(reply)["error"]["message"]
    assert not engine.requests
    assert local.call("GET", "/v1/models", host=host)[0] == 200, "no page gets to the socket"


def test_pages_that_may_ask(open_to_pages):
    raw = open_to_pages[1]
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    status, headers, _ = raw.call("OPTIONS", CHAT, **asks)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in headers["access-control-allow-headers"]
    status, headers, _ = raw.call("POST", CHAT, json.dumps(ASK).encode(), origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in headers["access-control-expose-headers"]
    status, headers, _ = raw.call("POST", CHAT, b"{", origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (400, PAGE), "errors can be read too"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://app.example.org", PAGE + ".evil", PAGE + ":8", ""],
)
def test_pages_that_may_not(open_to_pages, origin):
    engine, raw, _, _ = open_to_pages
    engine.requests.clear()
    status, headers, reply = raw.call("POST", CHAT, json.dumps(ASK).encode(), origin=origin)
    assert (status, json.loads(reply)["error"]["code"]) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in headers
    assert not engine.requests
    asks = {"origin": origin, "access-control-request-method": "POST"}
    status, headers, _ = raw.call("OPTIONS", CHAT, **asks)
    assert status >= 400 and "access-control-allow-origin" not in headers


def test_cors_is_off_by_default(raw, engine):
    own = f"http://{raw.address}"
    status, headers, _ = raw.call("POST", CHAT, json.dumps(ASK).encode(), origin=own)
    assert (status, "access-control-allow-origin" in headers) == (200, False), "its own page may"
    assert (
        raw.call("OPTIONS", CHAT, origin=PAGE, **{"access-control-request-method": "POST"})[0]
        == 403
    )


# --- sizes and times


@pytest.mark.parametrize("where", ["header", "headers", "address", "query"])
def test_large_heads(open_to_pages, where):
    raw, path, headers = open_to_pages[1], "/v1/models", {}
    if where == "headers":
        headers = {f"x-{i}": "v" * 90 for i in range(190)}
    elif where == "header":
        headers = {"x-big": "v" * 17_000}
    else:
        path += ("/" if where == "address" else "?") + "a" * 17_000
    status, _, reply = raw.call("GET", path, **headers)
    assert (status, json.loads(reply)["error"]["code"]) in (
        (431, "headers_too_large"),
        (400, "invalid_http"),
    )


def test_a_head_without_an_end(open_to_pages):
    host, port = open_to_pages[1].address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        reply = b""
        try:
            sock.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(200):
                sock.sendall(b"x-more: " + b"v" * 1000 + b"\r\n")
        except OSError:
            pass
        try:
            while data := sock.recv(65536):
                reply += data
        except OSError:
            pass
    assert reply.startswith(b"HTTP/1.1 400") and b"invalid_http" in reply


def test_a_body_that_does_not_come(open_to_pages):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{"
    assert b"request_timeout" in said(open_to_pages[1], head.encode(), b"request_timeout")


def test_a_head_that_does_not_come(script, monkeypatch):
    """Neither a silent connection nor one that says a letter now and then is held for ever."""
    monkeypatch.setattr("pipeline.server.connection.HEAD_S", 0.4)
    with serve_in_thread(script.Engine(), ServerSettings()) as base:
        host, port = urlsplit(base).netloc.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            sock.sendall(head)
            reply = b""
            while b"}}" not in reply:
                reply += sock.recv(65536)
            began = time.monotonic()
            sock.sendall(head[:5])
            assert sock.recv(10) == b""
            assert 0.2 < time.monotonic() - began < 3
        with socket.create_connection((host, int(port)), timeout=5) as silent:
            assert silent.recv(10) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx y: 1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx: a\x00b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    ],
)
def test_what_is_not_http(open_to_pages, data):
    reply = said(open_to_pages[1], data, b"}}")
    assert reply.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
    assert b'"error"' in reply
