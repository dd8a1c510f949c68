"""The table of docs/capabilities.md: what each KV policy really can on each kind of layer.

Nothing here is claimed: each cell runs rows of a tiny model whose layers are of that kind, and says
yes if every score equals that of rows which never rolled back, joined, were saved or speculated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pipeline.build import build, pipeline_to_run
from pipeline.catalog import Catalog, package_folder
from pipeline.compose import compose
from pipeline.errors import HeadraceError
from pipeline.lab.table import markdown
from pipeline.plan import plan

KINDS: Mapping[str, str] = {  # kind of layer -> the tiny family that has it
    "full attention": "llama",
    "sliding window": "gemma3",
    "sliding window with learned sinks": "gpt_oss",
    "chunked attention": "llama4",
    "keys and values shared between layers": "gemma4",
    "latent (MLA)": "deepseek_v3",
    "recurrent, gated delta": "qwen3_next",
    "recurrent, SSM": "mamba2",
    "several states in one layer": "falcon_h1",
}
HEAD = ("kind of layer", "kv", "layers covered", "rewind", "batch", "snapshot", "speculate")
WIDTH = 5
# Largest difference of two scores, of their spread: rounding by width stays below, one token too
# many or too few in a row's state is far above.
TOLERANCE = 0.02
Score = Any  # (positions, V) float32 on the host
Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Row:
    """One line of the table; each ability is "yes", or begins with "no" or "yes" and says what else."""

    kind: str
    policy: str
    covered: str
    kept: tuple[str, ...]
    cells: Mapping[str, str]


class Trial:
    """One policy on one opened model."""

    def __init__(self, target: Any, kv: Any):
        self.target, self.kv = target, kv

    def rows(self, *prompts: Sequence[int]) -> Any:
        """Rows that hold these prompts, read in one pass."""
        rows = self.kv.rows(self.target, WIDTH)
        rows.prepare_append([None] * len(prompts)).commit()
        self.run(rows, prompts)
        return rows

    def run(self, rows: Any, tokens: Tokens, keep: Sequence[int] | None = None) -> list[Score]:
        """One round that keeps `keep` inputs a row (all, where not said); each row's scores."""
        round = rows.begin(tokens)
        scores_BWV = self.target.head(self.target.hidden(round.tokens_BW, round.caches))
        round.launch(scores_BWV)
        found = np.asarray(scores_BWV)
        columns = [round.columns(row) for row in range(len(tokens))]
        round.resolve([len(ids) for ids in tokens] if keep is None else keep)
        rows.check_integrity()
        return [found[row, column] for row, column in enumerate(columns)]


def ids(length: int, seed: int = 0) -> list[int]:
    return [33 + (i * i * 7 + seed * 31 + i * 13) % 90 for i in range(length)]


def rewind(trial: Trial) -> str:
    """Append n, go back m, go on: as if n - m had been appended."""
    back, straight = trial.rows(ids(31)), trial.rows([*ids(31), 41, 42])
    for keep in (2, 0):
        trial.run(back, [[41, 42, 43, 44, 45] if keep else [50, 51]], [keep])
    return same(trial.run(back, [[60, 61, 62]]), trial.run(straight, [[60, 61, 62]]))


def batch(trial: Trial) -> str:
    """Rows of unequal length and width in one pass: each as alone."""
    prompts = [ids(3), ids(14, 1), ids(31, 2)]
    together, alone = trial.rows(*prompts), [trial.rows(prompt) for prompt in prompts]
    for tokens in ([[40], [41, 42], [43, 44, 45]], [[50, 51], [52], [53]]):
        wide = trial.run(together, tokens)
        narrow = [trial.run(rows, [row]) for rows, row in zip(alone, tokens, strict=True)]
        if (found := same(wide, [score for (score,) in narrow])) != "yes":
            return found
    return "yes"


def snapshot(trial: Trial) -> str:
    """What is saved after a rollback goes on in rows of its own, and its source goes on too."""
    rows = trial.rows(ids(31))
    trial.run(rows, [[41, 42, 43]], [1])
    state = rows.capture(0, [*ids(31), 41], "n")
    again = trial.kv.rows(trial.target, WIDTH)
    again.prepare_append([state]).commit()
    found = same(trial.run(again, [[60, 61]]), trial.run(rows, [[60, 61]]))
    return found if found != "yes" or not state.boundaries else "yes, at captured lengths"


def speculate(trial: Trial) -> str:
    """Bursts whose drafts are right, half right and wrong score as one token at a time."""
    told = ids(15, 5)  # bursts of 1 to 5 that are kept
    plain, burst = trial.rows(ids(31)), trial.rows(ids(31))
    expected = [trial.run(plain, [[token]])[0] for token in told]
    at = right = 0
    while at < len(told):
        window = [*told[at : at + 1 + right], *[7] * (WIDTH - 1 - right)][: len(told) - at]
        keep = min(1 + right, len(window))
        scores = trial.run(burst, [window], [keep])[0][:keep]
        if (found := same(scores[:, None], expected[at : at + keep])) != "yes":
            return found
        at, right = at + keep, (right + 1) % WIDTH
    return "yes"


ABILITIES: Mapping[str, Callable[[Trial], str]] = {
    "rewind": rewind,
    "batch": batch,
    "snapshot": snapshot,
    "speculate": speculate,
}


def same(found: Iterable[Score], expected: Iterable[Score]) -> str:
    """ "yes", or by how much of their spread the scores differ."""
    for one, other in zip(found, expected, strict=True):
        differing = float(np.abs(one - other).max() / np.ptp(other))
        if not differing <= TOLERANCE:
            return f"no: scores differ by {differing:.0%} of their spread"
    return "yes"


def measure(policies: Iterable[str] = (), kinds: Mapping[str, str] = KINDS) -> Iterator[Row]:
    """All rows of the table, a kind after the other; `policies` are options of kv, all if empty."""
    names = list(policies) or _all_policies()
    with TemporaryDirectory() as folder:
        for kind, family in kinds.items():
            settings = [f"model.family={family}", "model.head_size=64", "debug=none"]
            built = pipeline_to_run("tiny", settings)  # the device before any other part
            built.open()
            try:
                target = built.parts["model"]
                yield from (_row(kind, n, Trial(target, _policy(n, target, folder))) for n in names)
            finally:
                built.close()


def _all_policies() -> list[str]:
    """`native` first."""
    names = Catalog(package_folder("conf")).options("kv")
    return sorted(names, key=lambda name: (name != "native", name))


def _policy(name: str, target: Any, folder: str) -> Any:
    """The option as it is on disk; `per_layer`, whose map is one model's, with a map of this model."""
    own = [f"kv.map={layer_map(target, Path(folder))}"] if name == "per_layer" else []
    return build(plan(compose("tiny", [f"kv={name}", "debug=none", *own]))).parts["kv"]


def layer_map(target: Any, folder: Path) -> Path:
    """8 and 4 bits in turn, in every layer that holds keys and values."""
    own = [i if spec.group < 0 else spec.group for i, spec in enumerate(target.specs)]
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(own))}
    kinds = zip(own, target.specs, strict=True)
    layers = [numbers[layer] for layer, s in kinds if s.codable]
    entries = [{"layer_idx": i, "bits": 8 - 4 * (i % 2), "group_size": 64} for i in layers]
    file = folder / f"{target.name}.json"
    file.write_text(json.dumps(entries), encoding="utf-8")
    return file


def _row(kind: str, name: str, trial: Trial) -> Row:
    try:
        trial.kv.open()
        trial.kv.rows(trial.target, WIDTH).close()
        coverage = trial.kv.coverage(trial.target)
        cells = {ability: _tried(check, trial) for ability, check in ABILITIES.items()}
    except HeadraceError as error:
        reason = "no: " + re.sub(r"\S*/", "", " ".join(str(error).split()))
        return Row(kind, name, "none", (), dict.fromkeys(ABILITIES, reason))
    finally:
        trial.kv.close()
    kept = tuple(f"kept as computed, {why}" for why in coverage["kept"])
    return Row(kind, name, f"{coverage['covered']} of {coverage['layers']}", kept, cells)


def _tried(check: Callable[[Trial], str], trial: Trial) -> str:
    try:
        return check(trial)
    except Exception as error:
        return "no: " + " ".join(f"{type(error).__name__}: {error}".split())


def page(rows: Sequence[Row]) -> str:
    """Markdown: the table, and below it every reason once."""
    notes: dict[str, int] = {}
    table = [HEAD, *(_cells(row, notes) for row in rows)]
    reasons = [f"{number}. {text[:1].upper()}{text[1:]}." for text, number in notes.items()]
    return "\n".join([PREFACE, *markdown(table), "", *reasons, ""])


def _cells(row: Row, notes: dict[str, int]) -> tuple[str, ...]:
    covered = row.covered + "".join(_mark(why, notes) for why in row.kept)
    return (row.kind, row.policy, covered, *(_noted(cell, notes) for cell in row.cells.values()))


def _noted(cell: str, notes: dict[str, int]) -> str:
    for word in ("yes, ", "no: "):
        if cell.startswith(word):
            return word.rstrip(", :") + _mark(cell.removeprefix(word), notes)
    return cell


def _mark(text: str, notes: dict[str, int]) -> str:
    return f" ({notes.setdefault(text.rstrip('.'), len(notes) + 1)})"


PREFACE = """\
# What each KV policy can on each kind of layer

Made by `headrace capabilities > docs/capabilities.md`; a test compares. Every cell was run on a tiny model with layers
of the kind, and says yes where all scores equal those of rows that were never touched so:

* **rewind**: n tokens appended and m taken back are n - m appended;
* **batch**: rows of unequal length in one pass are each as alone;
* **snapshot**: a saved state goes on elsewhere, and its source goes on as well;
* **speculate**: bursts of right, half right and wrong drafts are one token at a time.

"Layers covered" are those that the policy stores, of all in the tiny model that keep state. The notes are below.
"""
