"""From what a user typed to one real place on disk."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.errors import OpenError
from pipeline.types.places import user_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def expand(path: str) -> Path:
    """`~`, `file://`, trailing slashes and links resolved; relative to the launch folder."""
    if path.startswith("file:"):
        path = unquote(urlsplit(path).path)
    return user_path(path).resolve()


def local_path(path: str) -> Path:
    """An existing file or folder. OpenError otherwise."""
    if not (place := expand(path)).exists():
        raise OpenError(f"No such file or folder: {place} (from '{path}').")
    return place


READ = (".json", ".safetensors", ".jinja", ".model", ".txt")


def checkpoint_files(folder: Path) -> list[Path]:
    """What is read of a folder in Hugging Face's layout, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in READ and path.is_file())


def is_hub_id(path: str) -> bool:
    """`owner/name`, and nothing that looks like a place on this disk."""
    return bool(HUB_ID.fullmatch(path)) and not expand(path).exists()
