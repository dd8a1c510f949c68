"""Who may ask: API keys, their limits, and what each family says to those who may not."""

from __future__ import annotations

import hashlib
import json
import re
import time
import urllib.request

import anthropic
import openai
import pytest

from pipeline.cli import main
from pipeline.errors import BusyError, ConfigError
from pipeline.server.keys import Key, make_key, presented, read_keys
from pipeline.server.quota import Quota
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.types import Accepted

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {"model": "m", "max_tokens": 9, **ASK}
SECRETS = {name: f"hr-secret-of-{name}" for name in ("alice", "bob", "slow", "few", "one", "boss")}
FIELDS = {
    "alice": "priority: 2, weight: 2.5",
    "bob": "",
    "slow": "rate: 2",
    "few": "rate: 2",
    "one": "concurrent: 1",
    "boss": "admin: true",
}


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@pytest.fixture(scope="module")
def keyed(script, tmp_path_factory):
    """A scripted engine behind keys, its address, and its folder of answers."""
    folder = tmp_path_factory.mktemp("keys")
    lines = [
        f'{name}: {{sha256: "{digest(SECRETS[name])}", {more}}}' for name, more in FIELDS.items()
    ]
    (folder / "keys.yaml").write_text("\n".join(lines))
    engine, answers = script.Engine(), folder / "answers"
    settings = ServerSettings(
        keys=str(folder / "keys.yaml"), responses_folder=str(answers), max_body_bytes=4096
    )
    with serve_in_thread(engine, settings) as base:
        yield engine, base, answers


@pytest.fixture
def engine(keyed, script):
    keyed[0].plan = script.greeting
    keyed[0].requests.clear()
    return keyed[0]


@pytest.fixture
def ask(keyed, script):
    """Status, headers and body of a request with these headers."""

    def send(path, body=None, method="POST", **headers):
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        status, got, reply = script.Raw(keyed[1]).call(method, path, data, **named)
        return status, got, json.loads(reply) if reply[:1] == b"{" else reply

    return send


def bearer(name):
    return {"authorization": f"Bearer {SECRETS[name]}"}


@pytest.mark.parametrize(
    "headers",
    [
        bearer("bob"),
        {"authorization": f"bearer  {SECRETS['bob']} "},
        {"x_api_key": SECRETS["bob"]},
        {"x_api_key": SECRETS["bob"], **bearer("bob")},
    ],
)
def test_a_key_opens(engine, ask, headers):
    assert ask(CHAT, ASK, **headers)[0] == 200
    assert engine.requests[0].client == "bob"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": SECRETS["bob"]},
        {"authorization": "Basic Ym9iOmJvYg=="},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {SECRETS['bob']}x"},
        {"authorization": f"Bearer {digest(SECRETS['bob'])}"},
        {"x_api_key": "k\xff\xfe"},
        {"x_api_key": SECRETS["alice"], **bearer("bob")},
        {"cookie": f"key={SECRETS['bob']}"},
    ],
)
def test_anything_else_does_not(engine, ask, headers):
    status, got, reply = ask(CHAT, ASK, **headers)
    assert (status, reply["error"]["code"], got["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )
    status, _, reply = ask("/v1/messages", MESSAGE, **headers)
    assert (status, reply["error"]["type"]) == (401, "authentication_error")
    assert not engine.requests
    assert SECRETS["bob"] not in str(reply)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", p) for p in ("/stats", "/metrics", "/v1/models", "/openapi.json", "/health/", "/nope", "/v1/responses/x")]
    + [("POST", p) for p in ("/tokenize", "/detokenize", "/v1/completions", "/v1/responses", "/admin/cache/flush")]
    + [("DELETE", "/v1/sessions/x"), ("OPTIONS", CHAT), ("GET", "/health%2f..%2fstats"), ("GET", "//health")],
)  # fmt: skip
def test_what_needs_a_key(ask, method, path):
    assert ask(path, {} if method == "POST" else None, method)[0] == 401


def test_health_needs_none_and_tells_strangers_little(ask):
    status, _, health = ask("/health", method="GET")
    assert (status, health) == (200, {"status": "ok", "state": "open"})
    assert ask("/ready", method="GET")[0] == 200
    assert "device" in ask("/health", None, "GET", **bearer("bob"))[2]


def test_official_clients_with_a_wrong_key(keyed):
    with openai.OpenAI(base_url=keyed[1] + "/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.chat.completions.create(model="m", **ASK)
        assert refused.value.code == "invalid_api_key"
    with (
        anthropic.Anthropic(base_url=keyed[1], api_key="x", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError, match="not known here"),
    ):
        other.messages.create(**MESSAGE)


def test_a_key_stands_for_all_its_users(engine, ask):
    """Its share, its priority and its sessions are its own, whatever a body says."""
    assert ask(CHAT, {**ASK, "user": "eve", "session_id": "s"}, **bearer("alice"))[0] == 200
    assert ask("/v1/messages", {**MESSAGE, "priority": -1}, **bearer("alice"))[0] == 200
    first, second = engine.requests
    assert (first.client, first.weight, first.priority, first.session_id) == (
        "alice",
        2.5,
        2,
        "alice/s",
    )
    assert (second.client, second.priority) == ("alice", -1)
    status, _, reply = ask(CHAT, {**ASK, "priority": 3}, **bearer("alice"))
    assert (status, reply["error"]["param"]) == (400, "priority")
    assert ask("/v1/sessions/s", None, "DELETE", **bearer("bob"))[0] == 204
    assert engine.sessions == ["bob/s"]


def test_requests_a_minute(engine, ask):
    assert [ask(CHAT, ASK, **bearer("slow"))[0] for _ in range(3)] == [200, 200, 429]
    status, headers, reply = ask("/v1/messages", MESSAGE, **bearer("slow"))
    assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
    assert 25 <= int(headers["retry-after"]) <= 30
    assert ask("/v1/models", None, "GET", **bearer("slow"))[0] == 200, "reading is not counted"
    assert ask(CHAT, ASK, **bearer("bob"))[0] == 200, "nobody else is held up"


def test_wrong_addresses_use_up_nothing(engine, ask, keyed):
    """Nor do those that fetch or set what is there: only work for the engine is counted."""
    for path, status in (("/v1/nope", 404), ("/health", 405), ("/v1/responses/x", 405)):
        assert [ask(path, ASK, **bearer("few"))[0] for _ in range(3)] == [status] * 3
    assert [ask(CHAT, ASK, **bearer("few"))[0] for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize(("name", "shown"), [("alice", False), ("boss", True)])
def test_settings_are_the_operators(engine, keyed, ask, monkeypatch, name, shown):
    """They have paths in them, as the device has; the graph and the figures are everybody's."""
    engine.describe = lambda: {"graph": {}, "settings": [{"path": "server.keys", "value": "/f"}]}
    device = {"blas": "openblas", "blas_path": "/lib/blas.so"}
    health = {"status": "ok", "state": "open", "device": device}
    monkeypatch.setattr(engine, "health", lambda: health)
    request = urllib.request.Request(f"{keyed[1]}/events", headers=bearer(name))
    with urllib.request.urlopen(request, timeout=5) as reply:
        assert reply.readline() == b"event: pipeline\n"
        served = json.loads(reply.readline().removeprefix(b"data: "))
    assert bool(served["settings"]) == shown and served["graph"] == {}
    told = ask("/health", None, "GET", **bearer(name))[2]["device"]
    assert told == served["device"] == (device if shown else {"blas": "openblas"})


def test_requests_at_a_time(engine, ask, keyed, script):
    engine.plan = lambda _: [Accepted(1), 30.0]
    with openai.OpenAI(base_url=keyed[1] + "/v1", api_key=SECRETS["one"], max_retries=0) as client:
        with client.chat.completions.create(model="m", **ASK, stream=True):
            script.eventually(lambda: engine.active == 1)
            status, headers, reply = ask(CHAT, ASK, **bearer("one"))
            assert (status, reply["error"]["code"]) == (429, "concurrency_limit_exceeded")
            assert headers["retry-after"] == "1"
        script.eventually(lambda: engine.active == 0)
        engine.plan = script.greeting
        script.eventually(lambda: ask(CHAT, ASK, **bearer("one"))[0] == 200)


def test_the_bucket_fills_by_the_clock():
    now, waits = [0.0], []
    quota = Quota(Key(sha256="0" * 64, rate=60.0), clock=lambda: now[0])

    def admitted() -> bool:
        try:
            with quota.request():
                return True
        except BusyError as busy:
            waits.append(busy.retry_after_s)
            return False

    assert sum(admitted() for _ in range(100)) == 60
    now[0] = 0.5
    assert not admitted()
    now[0] = 1.0
    assert admitted() and not admitted()
    now[0] = 10_000.0
    assert sum(admitted() for _ in range(100)) == 60, "no more than a minute's worth is saved up"
    assert all(0 < wait <= 1 for wait in waits)


@pytest.mark.parametrize("path", ["/admin/cache/flush"])
def test_admin_needs_an_admin(ask, path):
    status, _, reply = ask(path, None, **bearer("alice"))
    assert (status, reply["error"]["code"]) == (403, "forbidden")
    assert "server.socket" in reply["error"]["message"]
    assert ask(path, None, **bearer("boss"))[0] == 200


@pytest.mark.parametrize("family", ["/v1/responses", "/v1/messages"])
def test_answers_are_their_askers(engine, ask, keyed, family):
    """Nobody else reads, deletes or goes on from them, and on disk they lie apart."""
    if family == "/v1/responses":
        body, then = (
            {"input": "secret plan"},
            lambda name: {"input": "and?", "previous_response_id": name},
        )
    else:
        body = {**MESSAGE, "thread": {"type": "create"}}
        then = lambda name: {**MESSAGE, "thread": {"type": "continue", "previous_message_id": name}}  # noqa: E731
    name = ask(family, body, **bearer("alice"))[2]["id"]
    assert (keyed[2] / "alice" / f"{name}.json").exists()
    assert ask(family, then(name), **bearer("alice"))[0] == 200
    for path in (f"{family}/{name}", f"{family}/{name}/input_items"):
        for method in ("GET", "DELETE"):
            assert ask(path, None, method, **bearer("bob"))[0] in (404, 405)
    engine.requests.clear()
    for other in (name, f"../alice/{name}", f"alice/{name}"):
        assert ask(family, then(other), **bearer("bob"))[0] == 404
    assert not engine.requests
    assert ask(family, then(name), **bearer("alice"))[0] == 200, "it is still there"


def test_a_restarted_server_still_keeps_them_apart(keyed, ask):
    answers = keyed[2]
    name = ask("/v1/responses", {"input": "hi"}, **bearer("alice"))[2]["id"]
    settings = ServerSettings(responses_folder=str(answers))
    store = settings.store()
    assert store.get("alice", name) is not None
    assert store.get("bob", name) is None and store.get("", name) is None


def test_what_a_request_presents():
    headers = [
        (b"authorization", b"Bearer a"),
        (b"authorization", b"bearer b"),
        (b"x-api-key", b"a"),
        (b"x-api-key", b""),
    ]
    assert presented(headers) == {b"a", b"b"}


def test_a_key_is_made_and_read(capsys, tmp_path, monkeypatch):
    assert main(["key", "carol", "--admin"]) == 0
    told = capsys.readouterr()
    secret, line = told.out.removesuffix("\n"), told.err.splitlines()[1]
    assert re.fullmatch("hr-[A-Za-z0-9_-]{43}", secret), "the key alone: KEY=$(headrace key NAME)"
    assert secret not in told.err
    file = tmp_path / "keys.yaml"
    file.write_text(line)
    monkeypatch.setenv("TEST_KEYS", line)
    for source in (str(file), "env:TEST_KEYS"):
        ring = read_keys(source)
        assert ring.find(secret.encode()) == "carol" and ring.find(b"x") is None
        assert ring.keys["carol"].admin
    assert len(secret) > 40 and make_key()[0] != make_key()[0]
    assert main(["key", "../carol"]) == 2


def test_everything_wrong_with_a_file_is_said_at_once(tmp_path):
    file = tmp_path / "keys.yaml"
    good = "a" * 64
    file.write_text(
        f"alice: {{sha256: {good}, rate: -1, prority: 2}}\nBob: {{sha256: x}}\n"
        f"eve: {{sha256: {'b' * 64}}}\nmal: {{sha256: {'b' * 64}}}\n"
        "kim: hr-secret\nleo: {sha256: hr-secret}\nmia: {}\n"
    )
    with pytest.raises(ConfigError) as refused:
        read_keys(str(file))
    told = str(refused.value)
    for part in (
        "server.keys alice.rate",
        "server.keys alice.prority: a key takes no 'prority'. Did you mean 'priority'? It takes: sha256,",
        "server.keys kim: wants {sha256: …}, never the key itself. Make a key and its line: headrace key",
        "server.keys leo.sha256: wants the 64 digits of the key's SHA-256.",
        "server.keys mia.sha256: wants the 64 digits",
        "server.keys 'Bob'",
        "same hash as eve",
    ):
        assert part in told
    assert "hr-secret" not in told
    for source, part in (
        (str(tmp_path / "none"), "^- server.keys: .*none cannot be read: .* headrace key NAME$"),
        ("env:NO_SUCH", "has no NO_SUCH"),
    ):
        with pytest.raises(ConfigError, match=part):
            read_keys(source)
    file.write_text("")
    with pytest.raises(ConfigError, match="headrace key NAME"):
        read_keys(str(file))


def test_bad_keys_are_said_before_a_model_is_loaded(capsys):
    began = time.monotonic()
    assert (
        main(["serve", "fake", "server.port=0", "server.keys=/nowhere.yaml", "model.delay_ms=10"])
        == 2
    )
    assert "/nowhere.yaml" in capsys.readouterr().err
    assert time.monotonic() - began < 20
