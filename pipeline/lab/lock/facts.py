"""What is here: everything that a lock writes down and that a later start is compared with."""

from __future__ import annotations

import os
import platform as machine
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.build import Pipeline
from pipeline.drawing import as_dict
from pipeline.engine import Engine
from pipeline.errors import OpenError
from pipeline.identity import digest, file_digest
from pipeline.lab.table import PACKAGES, cpu_name
from pipeline.secrets import storable

Read = Callable[[Path], str]  # a file's digest
SOURCES = (".py", ".json", ".c", ".h", ".txt")
OWN = ("pipeline", "stages")
SWITCHES = ("MLX_", "OPENBLAS_")
UNINSTALLED = tuple(map(Requirement, PACKAGES))  # where headrace itself says nothing


def here(built: Pipeline) -> dict[str, Any]:
    """Sections that are known before anything is opened. Every file is read: nothing is remembered."""
    return {
        "choices": storable(built.choices, {}),
        "config": storable(built.config, built.composed.sources),
        "graph": digest(as_dict(built.graph)),
        "code": code(built.config),
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


def artifacts(built: Pipeline, read: Read = file_digest) -> dict[str, Any]:
    """group -> file -> size and digest, for every part that reads files; group -> why, where they cannot
    be read. `read` gives a file's digest."""
    found: dict[str, Any] = {}
    for group, part in built.parts.items():
        members = part if isinstance(part, list) else [part]
        try:
            files = [member.files() for member in members if hasattr(member, "files")]
            merged = {name: path for own in files for name, path in own.items()}
            found[group] = _told(merged, read)
        except (OpenError, OSError) as error:
            found[group] = str(error)
    return {group: files for group, files in found.items() if files}


def _told(files: Mapping[str, Path], read: Read) -> dict[str, Any]:
    return {
        name: {"bytes": path.stat().st_size, "digest": read(path)}
        for name, path in sorted(files.items())
    }


def packages() -> dict[str, str]:
    """Versions of everything that headrace depends on, however far, as it is installed."""
    found: dict[str, str] = {}
    waiting = [Requirement("headrace[cuda]")] if _installed("headrace") else list(UNINSTALLED)
    seen: list[Requirement] = []
    while waiting:
        wanted = waiting.pop()
        if wanted in seen or not (distribution := _installed(wanted.name)):
            continue
        seen.append(wanted)
        found[canonicalize_name(wanted.name)] = distribution.version
        waiting += _required(distribution, wanted.extras)
    return dict(sorted(found.items()))


def _installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _required(distribution: metadata.Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """Extras count where somebody asks for them: MLX's own libraries are of an extra."""
    asked = [{"extra": name} for name in (*extras, "")]
    for text in distribution.requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(map(wanted.marker.evaluate, asked)):
            yield wanted


def platform(device: Any, read: Read = file_digest) -> dict[str, Any]:
    """What arithmetic may depend on."""
    told = device.describe()
    return {
        "system": machine.system(),
        "machine": machine.machine(),
        "python": machine.python_version(),
        "cpu": cpu_name(),
        **{key: told.get(key) for key in ("kind", "blas", "kernels", "threads", "fusion")},
        "libraries": _told(device.libraries(), read),
        "environment": storable(_switches(), {}),
    }


def _switches() -> dict[str, str]:
    """Variables that choose kernels, but for threads, which `device.threads` settles."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith(SWITCHES)}
    return {name: chosen[name] for name in sorted(chosen) if not name.endswith("_THREADS")}


def code(config: Mapping[str, Any], read: Read = file_digest) -> dict[str, str]:
    """Digest of the sources of each package that a configuration names, ours first."""
    named = (target.partition(".")[0] for target in _targets(config))
    return {name: _sources(name, read) for name in dict.fromkeys([*OWN, *named])}


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield value
            else:
                yield from _targets(value)


def _sources(package: str, read: Read) -> str:
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
    return digest({name: read(path) for name, path in sorted(files)})
