"""What is here: everything that a lock writes down and that a later start is compared with."""

from __future__ import annotations

import platform as machine
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.build import Pipeline
from pipeline.drawing import as_dict
from pipeline.engine import Engine
from pipeline.errors import OpenError
from pipeline.identity import digest, file_digest
from pipeline.lab.lock.secrets import storable
from pipeline.lab.table import PACKAGES, cpu_name
from pipeline.plan import Plan

SOURCES = (".py", ".json", ".c", ".h")
OWN = ("pipeline", "stages")


def here(planned: Plan, built: Pipeline) -> dict[str, Any]:
    """Sections that are known before anything is opened. Every file is read: nothing is remembered."""
    return {
        "choices": storable(planned.composed.choices, {}),
        "config": storable(planned.config, planned.composed.sources),
        "graph": digest(as_dict(built.graph)),
        "code": {name: _sources(name) for name in _packages_of_code(planned.config)},
        "artifacts": artifacts(built),
        "packages": packages(),
        "platform": platform(built.parts["device"]),
    }


def of_the_model(engine: Engine) -> dict[str, Any]:
    """What only an opened model can tell."""
    model = engine.pipeline.parts["model"]
    template = model.tokenizer.template
    return {
        "tokenizer": model.tokenizer.identity,
        "template": digest({"": template}) if template else "",
        "vocab_size": model.vocab_size,
        "dtype": model.dtype,
        "layers": digest({"": [spec.signature for spec in model.specs]}),
        "end": sorted(model.eos_ids),
    }


def artifacts(built: Pipeline) -> dict[str, Any]:
    """group -> file -> size and digest, for every part that reads files; group -> why, where they cannot
    be read."""
    found: dict[str, Any] = {}
    for group, part in built.parts.items():
        members = part if isinstance(part, list) else [part]
        try:
            read = [member.files() for member in members if hasattr(member, "files")]
            found[group] = _told({name: path for files in read for name, path in files.items()})
        except (OpenError, OSError) as error:
            found[group] = str(error)
    return {group: files for group, files in found.items() if files}


def _told(files: Mapping[str, Path]) -> dict[str, Any]:
    return {
        name: {"bytes": path.stat().st_size, "digest": file_digest(path)}
        for name, path in sorted(files.items())
    }


def packages() -> dict[str, str]:
    """Versions of everything that headrace depends on, however far, as it is installed."""
    found: dict[str, str] = {}
    waiting = ["headrace"] if _installed("headrace") else list(PACKAGES)
    while waiting:
        name = _canonical(waiting.pop())
        if name in found or not (distribution := _installed(name)):
            continue
        found[name] = distribution.version
        waiting += _required(distribution.requires or ())
    return dict(sorted(found.items()))


def _installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required(requirements: Iterable[str]) -> Iterator[str]:
    """Names, those of extras left out."""
    for requirement in requirements:
        if "extra ==" not in requirement and (name := re.match(r"[\w.-]+", requirement)):
            yield name[0]


def platform(device: Any) -> dict[str, Any]:
    """What arithmetic may depend on."""
    told = device.describe()
    return {
        "system": machine.system(),
        "machine": machine.machine(),
        "python": machine.python_version(),
        "cpu": cpu_name(),
        **{key: told.get(key) for key in ("kind", "blas", "kernels", "threads", "fusion")},
    }


def _packages_of_code(config: Mapping[str, Any]) -> list[str]:
    """Ours, and those of classes that `--allow-code` let in."""
    return list(dict.fromkeys([*OWN, *(target.partition(".")[0] for target in _targets(config))]))


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield value
            else:
                yield from _targets(value)


def _sources(package: str) -> str:
    """Digest of a package's source files, by their place in it."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [
        (str(path.relative_to(place)), path)
        for place in places
        for path in Path(place).rglob("*")
        if path.suffix in SOURCES
    ]
    if not places and spec and spec.origin:
        files = [("", Path(spec.origin))]
    return digest({name: file_digest(path) for name, path in sorted(files)})
