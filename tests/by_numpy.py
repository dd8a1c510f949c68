"""Pieces of transformers in plain numpy, for forwards written out from their description."""

from __future__ import annotations

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def swiglu(x, w, name):
    gate = x @ w[f"{name}.gate_proj.weight"].T
    up = x @ w[f"{name}.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.down_proj.weight"].T


def turned(x, dims, theta, pairs=False, first=0):
    """RoPE of the first `dims` numbers of (L, H, d) from position `first`: halves against each
    other, or neighbours."""
    half = dims // 2
    angles = (first + np.arange(len(x)))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    if pairs:
        left, right = x[..., 0:dims:2], x[..., 1:dims:2]
        mixed = np.stack([left * cos - right * sin, right * cos + left * sin], -1)
        return np.concatenate([mixed.reshape(*x.shape[:-1], dims), x[..., dims:]], -1)
    left, right = x[..., :half], x[..., half:dims]
    turned_ = [left * cos - right * sin, right * cos + left * sin, x[..., dims:]]
    return np.concatenate(turned_, -1)


def attend(q, k, v, scale, seen=None):
    """(L, H, d) each; `seen` (queries, keys), causal if not given."""
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    seen = np.tril(np.ones(scores.shape[1:], bool)) if seen is None else seen
    scores = np.where(seen, scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(q), -1)
