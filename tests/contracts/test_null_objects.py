"""Adapters and constraints: what every option, the null objects first, must be able to answer."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from pipeline.types import Request

CONF = Path(__file__).parents[2] / "conf"
PATHS = {
    f"{group}={path.stem}": path
    for group in ("adapters", "constraint")
    for path in sorted((CONF / group).glob("*.yaml"))
}


@pytest.fixture(params=PATHS.values(), ids=PATHS.keys())
def part(request):
    settings = yaml.safe_load(request.param.read_text())
    module, name = settings.pop("_target_").rsplit(".", 1)
    made = getattr(import_module(module), name)(**settings)
    made.open()
    yield made
    made.close()
    made.close()


def test_a_plain_request_asks_nothing_of_them(part):
    request = Request(id="r", text="x")
    if hasattr(part, "identity"):
        assert json.dumps(part.identity(request)) == "{}"
    else:
        assert part.bind(request, None, [1]).free
