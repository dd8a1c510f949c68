"""Attention and SwiGLU on a Linux x86 CPU, where MLX's exponential is slow.

MLX evaluates exp there one element at a time, 10 to 20 ns each: in the prefill of 512 tokens that is
as much work as all matrix products. Attention's softmax goes to stages/_blas.c, together with the
product that follows it. SwiGLU's exp is a polynomial of plain operations, which the compiler
vectorizes once MLX has fused them: 2 to 4 ns, and nearer to the true value (relative error 8e-8
against 4e-6).

Both give a position the same bits whatever the width of the pass and whatever masked positions stand
around it, as the products do: a token of a long chunk equals, bit for bit, the same token scored in a
verify pass or decoded alone.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import mlx.core as mx

from pipeline.types import Device

BLOCK = 64  # queries; with fewer a time, more of the masked half of a causal chunk is skipped

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; n * LN2_HIGH is exact
# Cephes, expf: exp(r) = 1 + r + r^2 p(r) for |r| <= ln 2 / 2.
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
ROUND = 12582912.0  # 1.5 * 2^23: adding and then subtracting it rounds to an integer
LIMIT = 88.0  # exp(-88) comes out as 0 exactly; exp(88.7) is float32's largest


@partial(mx.compile, shapeless=True)
def _exp_parts(x: mx.array) -> tuple[mx.array, mx.array]:
    """exp(x) = fraction * 2^n as the fraction and the bits of 2^n; x is cut to -88..88."""
    x = mx.minimum(mx.maximum(x, -LIMIT), LIMIT)
    n = (x * LOG2_E + ROUND) - ROUND
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = EXP[0] * r + EXP[1]
    for coefficient in EXP[2:]:
        p = p * r + coefficient
    bits = mx.left_shift(n.astype(mx.int32) + 127, mx.array(23, mx.int32))
    return p * (r * r) + r + 1.0, bits


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, x: mx.array, fraction: mx.array, power: mx.array) -> mx.array:
    return gate * x / (1.0 + fraction * power)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x = gate * x / (1 + exp(-gate))."""
    fraction, bits = _exp_parts(-gate)
    return _gated(gate, x, fraction, bits.view(mx.float32))


def attention(q_BHWD: mx.array, k_BKTD: mx.array, v_BKTE: mx.array, scale: float, mask: Any) -> Any:
    """softmax(scale q k^T, masked) v, as (B, H, W, E). H is a multiple of K. `mask` is None,
    "causal" (the W queries are the last of the T positions) or True where (…, W, T) may attend.
    Only with our BLAS: others do not know what `_attend` asks them."""
    width, length = q_BHWD.shape[2], k_BKTD.shape[2]
    if not isinstance(mask, str):
        return _attend(q_BHWD, k_BKTD, v_BKTE, scale, mask)
    if width == 1:
        return _attend(q_BHWD, k_BKTD, v_BKTE, scale, None)
    blocks = []
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        seen = length - width + stop
        causal = mx.arange(seen - (stop - start), seen)[:, None] >= mx.arange(seen)
        q, k, v = q_BHWD[:, :, start:stop], k_BKTD[:, :, :seen], v_BKTE[:, :, :seen]
        blocks.append(_attend(q, k, v, scale, causal))
    return mx.concatenate(blocks, axis=2) if len(blocks) > 1 else blocks[0]


def _attend(
    q_BHWD: mx.array, k_BKTD: mx.array, v_BKTE: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    B, H, W, D = q_BHWD.shape
    K, T = k_BKTD.shape[1:3]
    scores = q_BHWD.reshape(B, K, H // K * W, D) @ k_BKTD.swapaxes(-1, -2)
    if mask is not None:
        open_heads = scores.reshape(B, H, W, T)
        scores = mx.where(mask, open_heads, mx.finfo(mx.float32).min).reshape(scores.shape)
    # alpha = NaN: our cblas_sgemm understands softmax(beta scores) v
    out = mx.addmm(mx.array(0.0), scores, v_BKTE, alpha=math.nan, beta=scale)
    return out.reshape(B, H, W, -1)


def quicken(model: Any, device: Device) -> list[str]:
    """Let the model's module (one of mlx-lm's) call the functions above. It is the module's names
    that change, for this process: mlx-lm's models offer no other place."""
    facts, module = device.describe(), sys.modules[type(model).__module__]
    done = []
    if facts.get("exact_width") and _wrap(module, "scaled_dot_product_attention", _attention):
        done.append("attention")
    if facts.get("slow_exp") and _wrap(module, "swiglu", _swiglu):
        mx.eval(swiglu(mx.ones((2, 2)), mx.ones((2, 2))))  # g++ runs now, once
        done.append("SwiGLU")
    return [f"A faster exponential than MLX's (x86 CPU) in: {', '.join(done)}."] if done else []


def _wrap(module: Any, name: str, made: Any) -> bool:
    theirs = getattr(module, name, None)
    if theirs is None or hasattr(theirs, "theirs"):
        return False
    ours = made(theirs)
    ours.theirs = theirs
    setattr(module, name, ours)
    return True


def _attention(theirs: Any) -> Any:
    def attend(
        q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        """Which way to go never depends on the width."""
        plain = mask is None or isinstance(mask, str) or mask.dtype == mx.bool_
        known = not hasattr(cache, "bits") and all(a.dtype == mx.float32 for a in (q, k, v))
        if plain and known and sinks is None and scale > 0:
            return attention(q, k, v, scale, mask)
        return theirs(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def _swiglu(theirs: Any) -> Any:
    def activate(gate: mx.array, x: mx.array) -> mx.array:
        return (swiglu if gate.dtype == mx.float32 else theirs)(gate, x)

    return activate
