"""`headrace list [GROUP]`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from pipeline.catalog import ALWAYS, Catalog, first_comment, package_folder, recipes
from pipeline.errors import ConfigError, Problem, nearest


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("group", nargs="?", help="print this group's options in full; or: recipes")


def run(args: Namespace) -> int:
    catalog = Catalog(package_folder("conf"))
    if args.group == "recipes":
        print(_recipes())
    elif args.group:
        print(describe_group(catalog, args.group))
    else:
        print(describe_all(catalog))
    return 0


def describe_all(catalog: Catalog) -> str:
    """Every group with its options; a star marks what base takes."""
    blocks = [_group(catalog, key, option) for key, option in catalog.base_choices().items()]
    stages = [_line(name, path) for name, path in catalog.options(ALWAYS).items()]
    blocks.append("\n".join([f"{ALWAYS}  (settings: {ALWAYS}.<name>.<setting>=VALUE)", *stages]))
    return "\n\n".join([*blocks, _recipes()])


def _recipes() -> str:
    found = [(name, path) for name, paths in recipes().items() for path in paths]
    return "\n".join(["recipes", *[_line(name, path) for name, path in found]])


def _group(catalog: Catalog, key: str, chosen: object) -> str:
    many = "  (takes a list)" if key == "tier" else ""
    options = catalog.options(key.partition("@")[0]).items()
    return "\n".join(
        [f"{key}{many}", *[_line(name, path, name == chosen) for name, path in options]]
    )


def _line(name: str, path: Path, chosen: bool = False) -> str:
    return f"  {'*' if chosen else ' '} {name:<20}{first_comment(path)}"


def describe_group(catalog: Catalog, group: str) -> str:
    """Each option's file: its comments say what a knob gains."""
    options = catalog.options(group.partition("@")[0])
    if not options:
        known = [*catalog.base_choices(), ALWAYS, "recipes"]
        hint = f"{nearest(group, known)} Groups: {', '.join(known)}."
        raise ConfigError([Problem(group, "no such group.", hint.strip())])
    texts = [(name, path.read_text(encoding="utf-8").strip()) for name, path in options.items()]
    return "\n\n".join(f"{group}={name}\n{_indented(text)}" for name, text in texts)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
