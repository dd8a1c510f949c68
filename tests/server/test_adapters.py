"""The field `adapter` in every family, and models that stand for one."""

from __future__ import annotations

import pytest

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
    ({"model": "fake/one:other"}, None),
    ({"model": "sql"}, None),
]


@pytest.mark.parametrize("path", FAMILIES)
def test_a_body_names_adapters_by_their_ids(engine, raw, path):
    for more, wanted in ASKED:
        status, _, reply = raw.post(path, {**FAMILIES[path], **more})
        assert status == 200, (more, reply)
        assert engine.requests[-1].adapter == wanted, more


@pytest.mark.parametrize("path", FAMILIES)
@pytest.mark.parametrize(
    "name", ["../sql", "/etc", "a/b", "sql+sql", "sql+none", "+", ".sql", {}, 1, [["sql"]]]
)
def test_what_can_be_no_id_is_refused(engine, raw, path, name):
    status, _, reply = raw.post(path, {**FAMILIES[path], "adapter": name})
    assert status == 400
    assert reply["error"]["message"].startswith("adapter: must be an id of an adapter")
    assert not engine.requests
