"""Overrides of tiny targets and of the tiny drafters that fit them (stages/drafters/neural/tiny.py)."""

from __future__ import annotations

from pathlib import Path

from stages.drafters.neural.tiny import checkpoint

TINY = {  # kind -> the target's family
    "eagle3": "llama",
    "mtp": "qwen3_5",
    "nextn": "deepseek_v3",
    "nextn_glm": "glm4_moe",
    "dflash": "llama",
    "dspark": "llama",
    "assistant": "gemma4",
}
KINDS = (*sorted(set(TINY) - {"nextn_glm"}), "auto")  # options that need a checkpoint
FAMILIES = {"dense": "llama", "sliding": "gemma3", "hybrid": "qwen3_5", "latent": "deepseek_v3"}
ONLY = {  # drafters made for one family: by kind of layer, which tiny one
    "mtp": {"hybrid": "mtp"},
    "nextn": {"latent": "nextn", "dense": "nextn_glm"},
    "assistant": {"sliding": "assistant"},
}


def tiny_checkpoint(kind: str, folder: Path) -> tuple[str, str, str]:
    """Write one; the overrides that choose its target and it."""
    drafter, family = kind.removesuffix("_glm"), TINY[kind]
    place = checkpoint(drafter, family, folder)
    return f"model.family={family}", f"drafter={drafter}", f"drafter.path={place}"


def tiny_pair(drafter: str, layers: str, folder: Path) -> tuple[str, ...]:
    """Overrides of a target with such layers and this drafter for it. What reads taps fits every
    target of its size; `auto` gets an EAGLE head."""
    family = f"model.family={FAMILIES[layers]}"
    if drafter in ONLY:
        return tiny_checkpoint(ONLY[drafter][layers], folder)
    if drafter not in KINDS:
        return family, f"drafter={drafter}"
    _, _, path = tiny_checkpoint("eagle3" if drafter == "auto" else drafter, folder)
    return family, f"drafter={drafter}", path
