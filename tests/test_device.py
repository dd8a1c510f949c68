"""The device in processes of its own: what a BLAS must do before mlx is imported cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stages.blas import extension

ROOT = Path(__file__).resolve().parent.parent

needs_extension = pytest.mark.skipif(extension() is None, reason="the C extension is not built")


def run(code: str, *flags: str) -> str:
    """Standard output of `code` in a fresh interpreter that imports from this tree."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_extension
def test_our_kernels_are_the_first_choice():
    out = run(
        "from stages.device import Device\n"
        "d = Device(threads=1); d.open(); d.open()\n"
        "import mlx.core as mx\n"
        "print(d.describe()['blas'], d.describe()['warnings'], (mx.ones((2, 3)) @ mx.ones((3, 2))).tolist())"
    )
    assert out == "extension+scipy-openblas32 [] [[3.0, 3.0], [3.0, 3.0]]\n"
