"""Runs a protocol's suite over every option on disk: a module says `GROUP = "sampler"`, its tests
take `option` (a class and its settings, made into a part by calling it). Options that take parts
are run with the module's `TOYS`, by parameter name, or left out where it has none for them."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import yaml

from pipeline.signature import signature

CONF = Path(__file__).parents[2] / "conf"


def _options(group, toys):
    for path in sorted((CONF / group).glob("*.yaml")):
        settings = yaml.safe_load(path.read_text()) or {}
        if not isinstance(target := settings.pop("_target_", None), str):
            continue
        module, name = target.rsplit(".", 1)
        part = getattr(importlib.import_module(module), name)
        given = list(signature(part).parts)  # those of a base class that are handed on, too
        if set(given) <= set(toys) and "defaults" not in settings:
            said = {k: v for k, v in settings.items() if "${" not in str(v)}  # of others' settings
            own = {key: value for key, value in said.items() if key not in given}
            yield path.stem, functools.partial(part, *(toys[name] for name in given), **own)


def pytest_generate_tests(metafunc):
    group = getattr(metafunc.module, "GROUP", None)
    if group and "option" in metafunc.fixturenames:
        found = dict(_options(group, getattr(metafunc.module, "TOYS", {})))
        metafunc.parametrize("option", found.values(), ids=found.keys())
