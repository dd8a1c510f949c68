"""`headrace show RECIPE [key=value …] [--open]`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import yaml

from pipeline.cli.arguments import add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--open",
        action="store_true",
        help="open the model too, and say which layers the KV policy covers, what a token costs, and "
        "which adapters are mounted",
    )


def run(args: Namespace) -> int:
    from pipeline.compose import compose
    from pipeline.plan import plan

    if args.open:
        return _opened(args)
    planned = plan(compose(args.recipe, args.overrides), allow=args.allow_code)
    print(f"# {planned.composed.recipe}: {describe_choices(planned.composed.choices)}")
    for line in yaml_lines(planned.config, planned.composed.sources):
        print(line)
    print(
        "# kv: layers covered and bytes a token are the model's to say: add --open, or see /stats"
    )
    return 0


def _opened(args: Namespace) -> int:
    """Only now are weights read."""
    from pipeline.build import pipeline_to_run
    from pipeline.engine import Engine

    built = pipeline_to_run(args.recipe, args.overrides, args.allow_code)
    with Engine(built) as engine:
        stats = engine.stats()
    print(f"# {args.recipe}: {describe_choices(built.choices)}")
    print(describe_coverage(stats["kv"]))
    told = {name: stats[name] for name in ("adapters", "memory")}
    print(yaml.safe_dump(told, sort_keys=False), end="")
    return 0


def describe_coverage(kv: Mapping[str, Any]) -> str:
    """What `/stats` says of the KV policy, as text."""
    settings = " ".join(f"{key}={value}" for key, value in kv["policy"].items())
    lines = [
        settings,
        f"  covers {kv['covered']} of {kv['layers']} layers that keep state",
        *(
            f"  keeps {count} as the model computes them: {why}"
            for why, count in kv["kept"].items()
        ),
        f"  {kv['bytes_per_token']:,.0f} bytes a token, slack apart",
    ]
    if early := kv.get("early_bytes_per_token"):
        lines.append(f"  {early:,.0f} more for a token of a row that has not passed kv.start yet")
    return "\n".join(lines)


def describe_choices(choices: Mapping[str, Any]) -> str:
    """`flow=plain model=fake …`, as one would type it."""
    shown = {k: f"[{','.join(v)}]" if isinstance(v, list) else v for k, v in choices.items()}
    return " ".join(f"{key}={option}" for key, option in shown.items())


def yaml_lines(
    config: Mapping[str, Any], sources: Mapping[str, str], path: str = ""
) -> Iterator[str]:
    """The configuration as YAML; values from elsewhere than the chosen option say where from."""
    indent = "  " * (path.count(".") + 1 if path else 0)
    for key, value in config.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from yaml_lines(value, sources, where)
        else:
            source = f"  # {sources[where]}" if where in sources else ""
            yield f"{indent}{_scalar(key)}: {_scalar(value)}{source}"


def _scalar(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple | set | frozenset) else value
    plain = str(plain) if isinstance(plain, PurePath) else plain
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
