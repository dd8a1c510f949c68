"""Adapters: every option answers for requests that name none, and names what it does not have."""

from __future__ import annotations

import json

import pytest
from targets import Cpu

from pipeline.errors import RequestError
from pipeline.types import Request
from stages.models.loading.row_adapters import RowAdapters

GROUP = "adapters"


class Target:
    row_adapters = RowAdapters()


TOYS = {"target": Target(), "device": Cpu()}


@pytest.fixture
def part(option):
    made = option()
    made.open()
    yield made
    made.close()
    made.close()


@pytest.mark.parametrize("asked", [None, ()])
def test_a_request_that_names_none_wears_nothing(part, asked):
    request = Request("r", text="x", adapter=asked)
    part.check(request)
    assert part.resolve(request) == ()
    assert part.holds(())
    with part.worn([(), ()]):
        pass
    assert (part.nbytes, json.dumps(list(part.stats()))) == (0, "[]")
    assert part.max_bytes >= 0


def test_what_is_not_mounted_is_refused_by_the_name_of_the_field(part):
    request = Request("r", text="x", adapter=("sql",))
    for ask in (part.check, part.resolve):
        with pytest.raises(RequestError) as refused:
            ask(request)
        assert (refused.value.param, refused.value.code) == ("adapter", "adapter_not_found")
    assert not part.holds(("0" * 32,))
