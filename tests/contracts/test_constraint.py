"""Constraints: what every option, the null object first, must be able to answer."""

from __future__ import annotations

import pytest

from pipeline.types import Request
from stages.models.none import NoModel

GROUP = "constraint"


@pytest.fixture
def part(option):
    made = option()
    made.open()
    yield made
    made.close()
    made.close()


def test_a_plain_request_asks_nothing_of_it(part):
    assert part.bind(Request(id="r", text="x"), NoModel(), False).free
