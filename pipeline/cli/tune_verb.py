"""`headrace tune RECIPE [key=value …] --goal latency|throughput|memory -o NAME.yaml`."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.arguments import UsageError, add_recipe, count
from pipeline.types.places import user_path

if TYPE_CHECKING:
    from pipeline.lab.tune.search import Step

GOALS = ("latency", "throughput", "memory")

AGAIN = "The same command goes on from there."  # said where it is interrupted


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--goal", choices=GOALS, required=True, help="what is wanted most")
    parser.add_argument(
        "--floor", type=float, default=0.95, metavar="SHARE",
        help="quality: least top-1 agreement with kv=native (0.95); 1: and no score may differ (KL 0)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats",
        type=count,
        default=3,
        metavar="N",
        help="measured passes a point, 3 or more (3)",
    )
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FOLDER",
        help="where points are kept and found again (runs/…)",
    )
    parser.add_argument("-o", "--output", type=user_path, required=True, metavar="NAME.yaml")


def run(args: Namespace) -> int:
    from pipeline.cli.progress import bar
    from pipeline.compose import compose
    from pipeline.lab.children import end_in_order
    from pipeline.lab.runners import LocalRunner
    from pipeline.lab.sides import Checked
    from pipeline.lab.tune import recipe
    from pipeline.lab.tune.goals import GOALS
    from pipeline.lab.tune.search import Search, Wanted

    end_in_order()
    _refuse(args)
    as_it_is = Checked.of(args.recipe, args.overrides, args.allow_code)
    recipe.check(args.output, as_it_is.built.composed)
    goal = GOALS[args.goal]
    wanted = Wanted(args.recipe, tuple(args.overrides), goal, args.floor, args.repeats)
    folder = args.out or Path("runs") / f"tune-{args.output.stem}"
    lines: list[str] = []
    with bar() as say:

        def tell(row: Any, of: int) -> None:
            say(row.label, min(row.number, of), of)

        search = Search(wanted, folder, LocalRunner(), tell, args.allow_code)
        for step in search.steps():
            lines.append(_told(step))
    tuned = compose(args.recipe, search.overrides)
    recipe.write(args.output, recipe.text(tuned, _head(args, goal.title, lines)), tuned)
    lock = shlex.quote(str(args.output.with_suffix(".lock.yaml")))
    print(f"{args.output}: {_next(args, 'serve')}; {_next(args, 'lock')} -o {lock}")
    return 0


def _refuse(args: Namespace) -> None:
    """Before anything is measured."""
    from pipeline.lab.tune.goals import LEAST_REPEATS

    if not 0 <= args.floor <= 1:
        raise UsageError(f"--floor: wants a share from 0 to 1, got {args.floor}")
    if args.repeats < LEAST_REPEATS:
        what = f"wants {LEAST_REPEATS} or more, got {args.repeats}"
        raise UsageError(f"--repeats: {what}: fewer do not tell what is better from what had luck")
    if args.output.suffix != ".yaml" or args.output.name.endswith(".lock.yaml"):
        raise UsageError(f"--output: a recipe's name ends with .yaml, got {args.output}")
    if not args.output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {args.output.parent}")
    if taken := [word for word in args.overrides if word.startswith("~")]:
        what = "a recipe cannot say that a setting is taken away. Type its value instead"
        raise UsageError(f"{taken[0]}: {what}")


def _told(step: Step) -> str:
    """Print the step, and return its line for the recipe's header."""
    from pipeline.lab.tune.goals import told

    if step.left:
        line = f"{step.knob.name}: as it was, {step.left}"
        print(line, file=sys.stderr)
        return line
    print(f"{step.knob.name}, by {step.metric}", file=sys.stderr)
    for verdict in step.verdicts:
        figure = told(verdict.row, step.metric)
        print(f"  {verdict.row.label}: {figure}; {verdict.why}", file=sys.stderr)
    kept = next((v for v in step.verdicts if v.row.label == step.chosen), step.verdicts[0])
    forced = "the first above the floor" if step.chosen else "nothing was better"
    why = kept.why if kept.better else forced
    name = step.chosen or "as it was"
    return f"{step.knob.name}: {name}, {step.metric} {told(kept.row, step.metric)}; {why}"


def _command(args: Namespace) -> str:
    from pipeline.secrets import command, typed

    asked = ["--goal", args.goal, "--floor", f"{args.floor:g}", "--repeats", str(args.repeats)]
    asked += ["--out", str(args.out)] if args.out else []
    asked += ["-o", str(args.output)]
    return command("tune", args.recipe, typed(args.overrides), args.allow_code, asked)


def _next(args: Namespace, verb: str) -> str:
    from pipeline.secrets import command

    return command(verb, str(args.output), (), args.allow_code)


def _head(args: Namespace, title: str, lines: list[str]) -> list[str]:
    from pipeline.lab.table import machine

    facts = machine(0)
    return [
        f"Goal: {Path(args.recipe).stem}, tuned: {title}.",
        f"  {_next(args, 'serve')}",
        f"Tuned by: {_command(args)}",
        *[f"  {line}" for line in lines],
        f"Run on: {facts['cpu']}, {facts['cores']} cores, {facts['system']}, {time.strftime('%Y-%m-%d')}.",
    ]
