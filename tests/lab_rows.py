"""A sweep's rows as if they had been measured: figures are made up, shapes are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.catalog import package_folder
from pipeline.lab.experiment import Experiment, Point
from pipeline.lab.jobs import FAILED, OK
from pipeline.lab.metrics import spread
from pipeline.lab.sweep import Row
from pipeline.lab.table import machine

METRICS = ("tokens_per_s", "acceptance", "kv_bytes_per_token", "peak_mb", "kl")
# kv, workload, tokens/s, bytes a KV token, KL; the names are as long as they come
KINDS = (
    ("kv=native", 33.0, 46080.0, 0.0),
    ("kv=kv8", 27.0, 12960.0, 0.0003),
    ("kv=rotated kv.k_bits=4 kv.v_bits=3", 24.0, 6600.0, 0.06),
    ("kv=kv4", 27.5, 7200.0, 0.078),
    ("kv=turboquant", 15.0, 10080.0, 0.02),
    ("kv=per_layer", 26.0, 8736.0, 0.042),
)
GOAL = "what each way of keeping keys and values gains in memory, and costs in quality and speed."
REASON = (
    "kv.group_size: 64 numbers share a scale, and heads of 16 have no 64. Try: kv.group_size=16"
)


def experiment(points: tuple[Point, ...] = ()) -> Experiment:
    path = Path(package_folder("recipes")) / "experiments" / "kv_quality.yaml"
    return Experiment("kv_quality", path, points, METRICS, 3, 512, goal=GOAL)


def contestant(label: str, rate: float, size: float, kl: float) -> dict[str, Any]:
    samples = {
        "tokens_per_s": [rate, rate * 1.02, rate * 0.97], "acceptance": [0.6, 0.62],
        "completion_tokens": [96, 96, 96], "kv_bytes_per_token": [size], "peak_mb": [700 + size / 1e3],
        "kl": [kl],
    }  # fmt: skip
    widths = [
        {"rows": 1, "width": width, "rounds": 9, "seconds": 9 * (0.02 + 0.004 * width)}
        for width in (1, 2, 3, 5, 9)
    ]
    return {
        "name": "kv_quality", "quality_tokens": 498, "choices": {"kv": label.split("=")[1].split()[0]},
        "figures": {name: spread(values) for name, values in samples.items()},
        "drafted_by_position": [50, 40, 22, 9, 1], "accepted_by_position": [40, 28, 12, 3, 1],
        "stage_seconds": {"verify": 2.0 * 30 / rate, "chunked_prefill": 0.9, "accept": 0.2, "tokenize": 0.001},
        "widths": widths, "blas": "extension+scipy-openblas32 avx2",
    }  # fmt: skip


def rows() -> list[Row]:
    """Six points under two workloads, and one that failed."""
    found = []
    for workload in ("long_prompt", "copy_edit"):
        for label, *figures in KINDS:
            both = (*label.split(), f"workload={workload}")
            result = {"machine": machine(1), "contestants": [contestant(label, *figures)]}
            made = Row(len(found) + 1, both, both, "d", workload, OK)
            made.result, made.kv = result, f"kv={result['contestants'][0]['choices']['kv']}"
            found.append(made)
    refused = ("kv=kv4", "model=tiny")
    bad = Row(len(found) + 1, refused, refused, status=FAILED, reason=REASON)
    return [*found, bad]
