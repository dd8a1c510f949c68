"""Canonical digests: what makes saved state reusable, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 (hex, 32 digits) over canonical JSON; every value is tagged by its key, so no two
    different mappings of plain data give one digest by running values together."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: Path) -> str:
    """SHA-256 (hex, 32 digits) of a file's bytes, read in 1 MiB blocks."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()[:32]
