"""Which of mlx-lm's families run in ragged rows: each is made small and random, and its answers in one
batch of unequal rows, with wrong drafts that go back, are compared with mlx-lm's own greedy loop.

    python tests/sweep_models.py [FAMILY ...]      a table in Markdown, as in docs/models.md

A family runs with the same tokens, or is refused when it opens with a sentence that says what to do.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from stages.device import Device

PROMPTS, TOKENS, DRAFTED = (3, 16, 31), 14, 2


@dataclass(frozen=True)
class Verdict:
    """`outcome`: runs, refused, or differs; `note` says what was refused or where it differs."""

    family: str
    kinds: str
    outcome: str
    note: str = ""


def verdict(family: str, folder: str) -> Verdict:
    from targets import Cpu

    from pipeline.errors import OpenError
    from stages.kv.native import Native
    from stages.models.tiny import Tiny

    part = Tiny(Cpu(), family=family, cache_dir=folder)
    kinds = ""
    try:
        part.open()
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(s.kind for s in part.specs).items())
        Native().rows(part, DRAFTED + 1).close()
    except OpenError as refusal:
        return Verdict(family, kinds, "refused", " ".join(str(refusal).split()))
    try:
        note = difference(part)
    finally:
        part.close()
    return Verdict(family, kinds, "differs" if note else "runs", note)


def difference(target: Any) -> str:
    """Where an answer in ragged rows first differs from mlx-lm's own; empty if nowhere."""
    from support import prompt_ids

    prompts = [prompt_ids(n, seed=n) for n in PROMPTS]
    truth = [alone(target, prompt) for prompt in prompts]
    got = together(target, prompts, truth)
    for n, one, other in zip(PROMPTS, truth, got, strict=True):
        if one != other:
            at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            return f"prompt of {n}: token {at + 1} of {TOKENS} differs"
    return ""


def alone(target: Any, prompt: list[int]) -> list[int]:
    """mlx-lm's own greedy decoding with its own caches, the last prompt token first."""
    import mlx.core as mx
    from targets import caches

    state, ids = caches(target), []
    if prompt[:-1]:
        mx.eval(target.hidden(mx.array([prompt[:-1]]), state))
    token = prompt[-1]
    for _ in range(TOKENS):
        scores = target.head(target.hidden(mx.array([[token]]), state))
        ids.append(token := int(scores[0, -1].argmax().item()))
    return ids


def together(target: Any, prompts: list[list[int]], truth: list[list[int]]) -> list[list[int]]:
    """The same in ragged rows, each prefilled alone and joined; row b drafts b tokens a round, of which
    the first is right every other time."""
    from stages.kv.native import Native

    rows = Native().rows(target, DRAFTED + 1)
    for prompt in prompts:
        one = Native().rows(target, DRAFTED + 1)
        one.prepare_append([None]).commit()
        _round(target, one, [prompt[:-1]], lambda scores, ids=prompt: [len(ids) - 1])
        state = one.extract(0, prompt[:-1], "n")
        rows.prepare_append([state]).commit()
    answers: list[list[int]] = [[] for _ in prompts]
    while min(map(len, answers)) < TOKENS:
        turn = sum(map(len, answers))
        asked = [
            [(answer or prompt)[-1], *_draft(right[len(answer) :], row, turn)]
            for row, (prompt, answer, right) in enumerate(zip(prompts, answers, truth, strict=True))
        ]

        def keep(best: Any, asked: list[list[int]] = asked) -> list[int]:
            counts = []
            for row, window in enumerate(asked):
                kept = 1
                while kept < len(window) and window[kept] == best[row][kept - 1]:
                    kept += 1
                answers[row].extend(best[row][:kept])
                counts.append(kept)
            return counts

        _round(target, rows, asked, keep)
        rows.check_integrity()
    return [answer[:TOKENS] for answer in answers]


def _draft(right: list[int], row: int, turn: int) -> list[int]:
    first = right[0] if right and turn % 2 else 7
    return [first, 8][:row]


def _round(target: Any, rows: Any, asked: list[list[int]], keep: Any) -> None:
    round = rows.begin(asked)
    scores = target.head(target.hidden(round.tokens_BW, round.caches))
    round.launch(scores)
    round.resolve(keep(scores.argmax(-1).tolist()))


def table(verdicts: list[Verdict]) -> str:
    lines = ["| family (mlx-lm's module) | layers of the small model | |", "|---|---|---|"]
    lines += [f"| {v.family} | {v.kinds} | {v.note or v.outcome} |" for v in verdicts]
    count = Counter(v.outcome for v in verdicts)
    return "\n".join([*lines, "", ", ".join(f"{n} {name}" for name, n in count.items())])


def main(names: list[str]) -> int:
    """1 if any family differs or fails otherwise than by a refusal."""
    Device().open()
    from stages.models.loading.families import FAMILIES
    from stages.models.loading.more_families import MORE

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for family in names or sorted({**FAMILIES, **MORE}):
            try:
                found = verdict(family, folder)
            except (Exception, SystemExit) as error:
                found = Verdict(family, "", "fails", f"{type(error).__name__}: {error}"[:300])
            print(found, file=sys.stderr, flush=True)
            verdicts.append(found)
    print(table(verdicts))
    return int(any(v.outcome in ("differs", "fails") for v in verdicts))


if __name__ == "__main__":
    sys.path[:0] = ["tests", "."]
    raise SystemExit(main(sys.argv[1:]))
