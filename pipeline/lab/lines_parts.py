"""What a drafter and a constraint cost by themselves: memory beside the model, and masks."""

from __future__ import annotations

import json

from pipeline.lab.figures import Figure, Promise
from pipeline.lab.lines import Bench, Line
from pipeline.lab.lines_engine import python

MASKS = """
import json, statistics, sys, time
import numpy as np
import pipeline
from pipeline.grammars import make_grammar
from pipeline.types import Request
schema = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["river", "lake", "sea"]},
        "lengths_km": {"type": "array", "items": {"type": "number"}, "minItems": 8, "maxItems": 8},
        "is_it_navigable": {"type": "boolean"},
    },
    "required": ["title", "kind", "lengths_km", "is_it_navigable"],
    "additionalProperties": False,
}
with pipeline.load("structured", "drafter=none", "tier=none") as engine:
    target, constraint = (engine.pipeline.parts[name] for name in ("model", "constraint"))
    request = Request("masks", text="x", grammar=make_grammar("json_schema", schema, "grammar"))
    scores_V = np.random.default_rng(0).standard_normal(target.vocab_size).astype(np.float32)
    best = None
    for turn in range(int(sys.argv[1])):
        matcher, spent = constraint.bind(request, target, [1]), []
        while not matcher.done and len(spent) < 400:
            began = time.perf_counter()
            legal_V = matcher.mask(scores_V)
            spent.append(time.perf_counter() - began)
            matcher.push(int((legal_V + np.random.default_rng(len(spent)).gumbel(
                size=len(legal_V))).argmax()))
        best = spent if best is None or sum(spent) / len(spent) < sum(best) / len(best) else best
    best.sort()
    print(json.dumps([statistics.median(best), best[int(0.95 * len(best))], best[-1], len(best),
                      target.vocab_size]))
"""

BYTES = """
import gc, json, tempfile
from pathlib import Path
import pipeline
with pipeline.load("structured", "drafter=cascade", "drafter.order=[grammar,suffix,ngram]",
                   "tier=none") as engine:
    def measure():
        import mlx.core as mx
        from stages.drafters.dflash import DFlash
        from stages.drafters.eagle3 import Eagle3
        from stages.drafters.neural.block import block_shapes, head_norms
        parts = engine.pipeline.parts
        target = parts["model"]
        H, size, heads, kv, inner = target.hidden_size, 64, 9, 3, 1536
        config = {"hidden_size": H, "intermediate_size": inner, "num_attention_heads": heads,
                  "num_key_value_heads": kv, "head_dim": size, "rms_norm_eps": 1e-5,
                  "rope_theta": 1e5, "vocab_size": target.vocab_size}
        fc = {"fc.weight": (H, 3 * H), "norm.weight": (H,)}
        eagle = block_shapes("midlayer.", H, inner, size, heads, kv, wide=2) | fc | {
            "midlayer.hidden_norm.weight": (H,), "lm_head.weight": (8192, H), "d2t": (8192,)}
        block = block_shapes("layers.0.", H, inner, size, heads, kv) | fc | {
            "hidden_norm.weight": (H,), **head_norms("layers.0.", size)}
        kinds = {
            "eagle3": (Eagle3, eagle, {"architectures": ["LlamaForCausalLMEagle3"],
                                       "draft_vocab_size": 8192}),
            "dflash": (DFlash, block, {
                "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1,
                "dflash_config": {"block_size": 8, "mask_token_id": 0,
                                  "target_layer_ids": [1, 14, 28]}}),
        }
        def used():
            gc.collect(); mx.clear_cache()
            return mx.get_active_memory()
        found = {}
        for name, (kind, shapes, more) in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(config | more))
                file = str(Path(folder, "model.safetensors"))
                mx.save_safetensors(file, {
                    key: mx.zeros(shape, mx.int64 if key == "d2t" else mx.float32)
                    for key, shape in shapes.items()})
                own, before = Path(file).stat().st_size, used()
                drafter = kind(target, path=folder)
                drafter.open()
                drafter.rows(target, 9)
                found[name] = own, used() - before
                drafter.close()
                del drafter
        before = used()
        parts["drafter"].close()
        found["grammar, suffix and ngram"] = 0, before - used()
        return target.weight_bytes, found
    print(json.dumps(engine.exclusive(measure)))
"""


def masks(bench: Bench) -> list[Figure]:
    """Scores of SmolLM2's 49,152 tokens masked by a JSON schema, token after token of an answer."""
    said = json.loads(python(bench, "-c", MASKS, str(bench.pairs)))
    median, late, worst, count, vocabulary = said
    title = f"a JSON schema's mask of {vocabulary:,} scores, a row and token"
    note = f"median of {count}; 95 of 100 below {late * 1e3:.2f}, the longest {worst * 1e3:.2f} ms"
    return [Figure("masks", title, median * 1e3, Promise("<=", 1), "ms", note=note)]


def drafter_bytes(bench: Bench) -> list[Figure]:
    """What drafters of the real layouts add beyond their own files, as a share of the model's weights,
    whose embedding and head they use."""
    model, found = json.loads(python(bench, "-c", BYTES))
    most = max(added - own for own, added in found.values())
    note = ", ".join(
        f"{name} of {own / 1e6:.1f} MB adds {added / 1e6:.1f}" if own else f"{name} add {added}"
        for name, (own, added) in found.items()
    )
    title = f"memory a drafter adds beyond its own file, of the model's {model / 1e6:.0f} MB"
    share = 100 * max(0, most) / model
    return [Figure("drafter/bytes", title, share, Promise("<=", 1), "%", note=note)]


LINES = (Line(("masks",), masks), Line(("drafter/bytes",), drafter_bytes))
