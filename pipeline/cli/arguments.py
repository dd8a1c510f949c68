"""Reads the command line. Overrides (`key=value`) may stand anywhere after the recipe."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

from pipeline.errors import HeadraceError, nearest

VERBS = {
    "list": "groups, their options and the recipes; or one group's options in full",
    "show": "the composed YAML, which option each group took, and where values come from",
    "diff": "what differs from base, between two recipes, or between two locks",
    "check": "prove that a recipe fits together, without reading any weight",
    "graph": "draw the pipeline: phases, stages, fields on the arrows",
    "generate": "answer one prompt, without HTTP",
    "serve": "serve a recipe, or exactly what a lock describes, over an OpenAI-compatible HTTP API",
    "lock": "write down what was tested: configuration, files, versions, machine, answers to probes",
    "replay": "ask a lock's probes again and compare every token",
    "key": "make an API key: the key itself, once, and the line for the file of server.keys",
    "cache": "look at, check, collect, flush or compute ahead the saved states on disk",
    "doctor": "which device and BLAS are in use, and how fast they are",
    "demo": "graph, server, one streamed answer, and where the time went",
    "quality": "what a KV policy costs in quality: KL, top-1 agreement and perplexity against native",
    "capabilities": "what each KV policy can on each kind of layer, tried on tiny models",
    "matrix": "what works with what: every drafter, KV policy and kind of layer, tried on tiny models",
    "bench": "measure a recipe under a workload, alone or by turns with another or with mlx-lm's server",
    "sweep": "measure every point of an experiment, once, and write a table and a report",
    "tune": "choose kv, drafter, depth, chunk and rows for a goal by measuring, and write a recipe",
}
EPILOG = """\
RECIPE is a name (headrace list) or the path of your own YAML file. After it, GROUP=OPTION chooses
an option and GROUP.setting=VALUE turns a knob; options are joined first, whatever the order.
"""


class UsageError(HeadraceError):
    """The command line itself is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        raise UsageError(f"{message}{end} Try: {self.prog} --help")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The verb's module as `verb`, and its arguments. UsageError for what cannot be understood."""
    parser = _top()
    if not words or words[0].startswith("-"):
        parser.parse_args(words or ["--help"])
    name, rest = words[0], words[1:]
    if name not in VERBS:
        hint = nearest(name, VERBS) or f"Verbs: {', '.join(VERBS)}."
        raise UsageError(f"no such verb: '{name}'. {hint} Try: headrace --help")
    verb = importlib.import_module(f"pipeline.cli.{name}_verb")
    inner = _Parser(prog=f"headrace {name}", description=VERBS[name], allow_abbrev=False)
    inner.add_argument("--traceback", action="store_true", help="show where an error happened")
    verb.add_arguments(inner)
    inner.epilog = EPILOG if any(a.dest == "overrides" for a in inner._actions) else None
    args, extra = inner.parse_known_args(rest)
    _adopt(inner, args, extra)
    args.verb = verb
    return args


def _top() -> _Parser:
    lines = "\n".join(f"  {name:<13}{what}" for name, what in VERBS.items())
    parser = _Parser(
        prog="headrace",
        usage="headrace VERB [RECIPE] [key=value …] [options]",
        description=f"Serve language models from recipes.\n\nverbs:\n{lines}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *said: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"headrace {version('headrace')}")
        except PackageNotFoundError:
            print("headrace, not installed: run from its sources")
        parser.exit()


def _adopt(parser: _Parser, args: argparse.Namespace, extra: Sequence[str]) -> None:
    """Overrides typed after an option are overrides too; anything else left over is a mistake."""
    wrong = [word for word in extra if word.startswith("-") or not hasattr(args, "overrides")]
    if wrong:
        known = [option for action in parser._actions for option in action.option_strings]
        hint = nearest(wrong[0].partition("=")[0], known)
        parser.error(f"unknown: {' '.join(wrong)}" + (f". {hint}" if hint else ""))
    if extra:
        args.overrides += extra


def add_drift(parser: Any) -> None:
    """The argument of verbs that hold a lock against what is here."""
    parser.add_argument(
        "--allow-drift", metavar="NAME,…",
        help="of a lock: what may differ here (platform, packages, config.server, packages.numpy, …)",
    )  # fmt: skip


def add_recipe(
    parser: Any, *, metavar: str = "RECIPE", more: str = "", optional: bool = False
) -> None:
    """The arguments of every verb that composes a recipe. `more` may stand before the overrides."""
    if not optional:
        what = "name, or path of a YAML file" if metavar == "RECIPE" else None
        parser.add_argument("recipe", metavar=metavar, help=what)
    parser.add_argument("overrides", metavar=f"{more} key=value".strip(), nargs="*", default=[])
    parser.add_argument(
        "--allow-code", metavar="PREFIX", action="append", default=[],
        help="also run classes under this package (they are code: allow only what you trust)",
    )  # fmt: skip


def count(text: str) -> int:
    """The type of an option that wants 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a whole number, 1 or more, got '{text}'")
    return int(text)
