"""From what a user typed to a path."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | os.PathLike[str]) -> Path:
    """With `~` as the user's home. A `~name` of nobody stays as it is, so that it is not found like any
    other wrong path; `Path.expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(text))
