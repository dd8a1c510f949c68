"""Runs a protocol's suite over every option on disk: a module says `GROUP = "sampler"`, its tests
take `option` (a class and its settings, made into a part by calling it)."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path

import yaml

CONF = Path(__file__).parents[2] / "conf"


def _options(group):
    for path in sorted((CONF / group).glob("*.yaml")):
        settings = yaml.safe_load(path.read_text()) or {}
        if not isinstance(target := settings.pop("_target_", None), str):
            continue
        module, name = target.rsplit(".", 1)
        part = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(part).parameters.values()
        if all(p.kind is p.KEYWORD_ONLY for p in parameters) and "defaults" not in settings:
            yield path.stem, functools.partial(part, **settings)


def pytest_generate_tests(metafunc):
    group = getattr(metafunc.module, "GROUP", None)
    if group and "option" in metafunc.fixturenames:
        found = dict(_options(group))
        metafunc.parametrize("option", found.values(), ids=found.keys())
