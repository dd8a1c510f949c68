"""What a KV policy costs in quality: KL, perplexity and top-1 agreement against `kv=native`, by length.

A text is forced through the model in small chunks, so that every token attends to what the policy
kept of those before it. The native run leaves its hidden states as the reference (`stages/score.py`),
and each policy's run is compared with them token by token, over the whole vocabulary.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.build import pipeline_to_run
from pipeline.catalog import Catalog, find_recipe, package_folder
from pipeline.compose import Composed, compose, leaves
from pipeline.engine import Engine
from pipeline.errors import ConfigError, HeadraceError, OpenError, Problem
from pipeline.lab.table import markdown
from pipeline.overrides import choice_problem
from pipeline.secrets import storable

LENGTHS = (128, 256, 512, 1024, 2048)  # tokens of context that end a line of the table
CHUNK = 64  # tokens that are scored at once
SCORING = {
    "flow": "score",
    "drafter": "none",
    "draft_model": "none",
    "depth": "fixed",
    "tier": "none",
}
OURS = tuple(SCORING)  # groups that are ours to choose
OWN = re.compile(rf"[~+]*({'|'.join(OURS)}|model@draft_model|stage\.score)\b")
KV = re.compile(r"[~+]*kv\b")
FLOW = (*(f"{group}={option}" for group, option in SCORING.items()), "debug=none")
NATIVE = ("kv=native",)


@dataclass(frozen=True)
class Line:
    """Means over the tokens that have `low + 1` to `high` tokens before them."""

    low: int
    high: int
    tokens: int
    kl: float  # nats, KL(native || policy)
    top1: float  # share of tokens where both hold the same one for the best
    perplexity: float
    native_perplexity: float


@dataclass(frozen=True)
class Outcome:
    """One policy: its lines and the line over all, or why it cannot be used here."""

    policy: str
    bytes_per_token: float | None = None
    lines: tuple[Line, ...] = ()
    whole: Line | None = None
    refused: str = ""


@dataclass(frozen=True)
class Asked:
    """A recipe, the overrides of every run, and those of each policy's own."""

    recipe: str
    overrides: tuple[str, ...]
    policies: Mapping[str, tuple[str, ...]]
    named: bool  # by the user: one that cannot be used is an error, not a line
    allow: tuple[str, ...] = ()
    without: tuple[str, ...] = OURS  # groups whose values in the recipe are not the policies'


def asked(
    recipe: str, overrides: Sequence[str], named: Sequence[str], allow: Iterable[str] = ()
) -> Asked:
    """The policies named, as they are listed; else the one chosen; else, where that is `native` by
    default, all there are. ConfigError for those named beside one that is typed."""
    _refuse_unknown(recipe, named)
    one = chosen(recipe, overrides, allow)
    if named and one.named:
        what = "scores policies as they are listed, and others are typed with their settings: not both."
        raise ConfigError([Problem("--kv", what, f"Try: kv={named[0]} kv.SETTING=VALUE")])
    if not named and (one.named or "kv=native" not in one.policies):
        return one
    known = set(Catalog(package_folder("conf")).options("kv")) - {"native"}
    policies = {f"kv={name}": (f"kv={name}",) for name in named or sorted(known) or ["native"]}
    return replace(one, policies=policies, named=bool(named), without=(*OURS, "kv"))


def chosen(recipe: str, overrides: Sequence[str], allow: Iterable[str] = ()) -> Asked:
    """The one policy that the recipe and what is typed choose, with its settings of either."""
    common = tuple(text for text in overrides if not OWN.match(text) and not KV.match(text))
    own = tuple(text for text in overrides if KV.match(text))
    label = policy_name(compose(recipe, [*common, *own]), own)
    return Asked(recipe, common, {label: own}, bool(own), tuple(allow))


def policy_name(composed: Composed, own: Iterable[str] = ()) -> str:
    """The option, and what is not as it is listed."""
    told = leaves(storable(composed.config["kv"], composed.sources, "kv"), "kv")
    said = [f"{path}={value}" for path, value in told if path in composed.sources]
    taken = [text for text in own if text.startswith("~")]
    return " ".join([f"kv={composed.choices['kv']}", *said, *taken])


def _refuse_unknown(recipe: str, named: Sequence[str]) -> None:
    """ConfigError for all names of no policy, ours or beside the recipe."""
    catalog = Catalog(package_folder("conf"), (find_recipe(recipe).parent,))
    base = catalog.base_choices()
    found = [choice_problem("kv", name, base, catalog) for name in named]
    if problems := list(filter(None, found)):
        raise ConfigError(problems)


def measure(
    wanted: Asked,
    text: str,
    lengths: Sequence[int] = LENGTHS,
    say: Callable[[str], None] = print,
    name: str = "the text",
) -> dict[str, Any]:
    """Score `text` under native, then under each policy. Plain data: model, tokens, outcomes."""
    with TemporaryDirectory() as folder:
        runs = _Runs(wanted, f"{folder}/reference", say)
        runs.check()
        model, ids = runs.record(text, max(lengths), name)
        outcomes = [
            runs.outcome(label, own, ids, lengths) for label, own in wanted.policies.items()
        ]
    return {"model": model, "tokens": len(ids), "chunk": CHUNK, "outcomes": outcomes}


@dataclass(frozen=True)
class _Runs:
    wanted: Asked
    folder: str
    say: Callable[[str], None]

    def check(self) -> None:
        """ConfigError for policies named that do not fit together, before the long reference run."""
        for own in self.wanted.policies.values() if self.wanted.named else ():
            self._load(own, "reference", self.wanted.without)

    def record(self, text: str, most: int, name: str) -> tuple[str, list[int]]:
        """The native run: the model's name and the ids that were scored."""
        with self._load(NATIVE, "record", (*OURS, "kv")) as engine:
            info = engine.target_info
            ids = engine.tokenizer.encode(text)[: min(most + 1, info["context_len"] - 1)]
            if len(ids) < 2:
                what = f"at least 2 tokens can be scored, and here it gives {len(ids)}"
                raise HeadraceError(f"{name}: {what}")
            self.say("kv=native: the reference")
            _score(engine, ids)
        return info["name"], ids

    def outcome(
        self, label: str, own: Sequence[str], ids: list[int], lengths: Sequence[int]
    ) -> Outcome:
        try:
            with self._load(own, "reference", self.wanted.without) as engine:
                parts = engine.pipeline.parts
                size = float(parts["kv"].bytes_per_token(parts["model"]))
                self.say(f"{label}: {len(ids)} tokens")
                entries = _score(engine, ids)
        except (OpenError, ConfigError) as error:
            if self.wanted.named:
                raise
            self.say(f"{label}: cannot be used")
            return Outcome(label, refused=" ".join(str(error).split()))
        lines = tuple(_lines(entries, lengths))
        return Outcome(label, size, lines, _line(entries, 0, len(entries)))

    def _load(self, own: Sequence[str], what: str, without: Sequence[str]) -> Any:
        wanted = self.wanted
        settings = [*wanted.overrides, *own, *FLOW, f"stage.score.{what}={self.folder}"]
        return Engine(pipeline_to_run(wanted.recipe, settings, wanted.allow, without))


def _score(engine: Any, ids: list[int]) -> list[dict[str, Any]]:
    answer = engine.generate(ids, prompt_logprobs=0, max_tokens=0, prefill_chunk=CHUNK)
    found: list[dict[str, Any]] = answer["prompt_logprobs"][1:]
    return found


def _lines(entries: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Iterator[Line]:
    for low, high in zip((0, *lengths), lengths, strict=False):
        if low < len(entries):
            yield _line(entries[low:high], low, min(high, len(entries)))


def _line(entries: Sequence[Mapping[str, Any]], low: int, high: int) -> Line:
    against = [entry["against"] for entry in entries]
    return Line(
        low,
        high,
        len(entries),
        sum(a["kl"] for a in against) / len(entries),
        sum(a["agrees"] for a in against) / len(entries),
        math.exp(-sum(entry["logprob"] for entry in entries) / len(entries)),
        math.exp(-sum(a["logprob"] for a in against) / len(entries)),
    )


def as_json(report: Mapping[str, Any]) -> dict[str, Any]:
    return {**report, "outcomes": [asdict(outcome) for outcome in report["outcomes"]]}


def as_text(report: Mapping[str, Any]) -> str:
    """One table of all policies, and what has to be said about it."""
    head = ("policy", "bytes a token", "context", "KL", "top-1", "perplexity", "native's")
    rows = [row for outcome in report["outcomes"] for row in _rows(outcome)]
    run = f"{report['tokens']} tokens in chunks of {report['chunk']}"
    title = f"{report['model']}: {run}, each KV policy against native"
    refused = [f"{o.policy} cannot be used: {o.refused}" for o in report["outcomes"] if o.refused]
    zero = [o.policy for o in report["outcomes"] if o.policy == "kv=native"]
    same = ["kv=native is the reference itself: all its differences are zero."] if zero else []
    table = markdown([head, *rows]) if rows else []
    return "\n".join([title, "", *table, "", *same, *refused]).strip()


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    if outcome.whole is None or outcome.bytes_per_token is None:  # refused
        return
    for line in (*outcome.lines, outcome.whole):
        context = "all" if line is outcome.whole else f"{line.low + 1}-{line.high}"
        first = line is outcome.lines[0]
        yield (
            outcome.policy if first else "",
            f"{outcome.bytes_per_token:,.0f}" if first else "",
            context,
            f"{line.kl:.2g}" if line.kl else "0",
            f"{line.top1:.1%}",
            f"{line.perplexity:.3f}",
            f"{line.native_perplexity:.3f}",
        )


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
