"""Print whether the tree keeps its size budgets (short functions, short files, short YAML); exit 1 if not.

Run by `make check` as `python tests/budgets.py [ROOT]`. Small pieces are what makes a part
readable in one sitting; when a budget hurts, a concept is missing.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

FOLDERS = ("pipeline", "stages", "conf", "recipes")
FUNCTION_MEDIAN, FUNCTION_P90, FUNCTION_MAX = 8, 30, 60  # lines
FILE_MEDIAN, FILE_MAX = 120, 400  # lines
YAML_MAX, RECIPE_MAX, BASE_MAX = 25, 40, 60  # lines

Sizes = dict[str, int]  # where -> lines


def files(root: Path, pattern: str) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob(pattern))


def lines_of(root: Path, pattern: str) -> Sizes:
    return {
        str(path.relative_to(root)): path.read_text().count("\n") for path in files(root, pattern)
    }


def functions_of(root: Path) -> Sizes:
    sizes = {}
    for path in files(root, "*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
                sizes[where] = (node.end_lineno or node.lineno) - node.lineno + 1
    return sizes


def yaml_budget(where: str) -> int:
    if where == "conf/base.yaml":
        return BASE_MAX
    return RECIPE_MAX if where.startswith("recipes/") else YAML_MAX


def too_long(sizes: Sizes, budget: int) -> list[str]:
    return [f"{where}: {n} lines, budget {budget}" for where, n in sizes.items() if n > budget]


def problems(root: Path) -> list[str]:
    """Everything over its budget, and the one line of figures printed on the way."""
    functions, python, yaml = functions_of(root), lines_of(root, "*.py"), lines_of(root, "*.yaml")
    lengths = sorted(functions.values()) or [0]
    median, p90 = statistics.median(lengths), lengths[int(len(lengths) * 0.9)]
    # Empty package markers are no files to read: they must not flatter the median.
    file_median = statistics.median([n for n in python.values() if n] or [0])
    print(
        f"{len(python)} Python files (median {file_median:g} lines, longest {max(python.values(), default=0)}), "
        f"{len(functions)} functions (median {median:g}, 90 % {p90}, longest {lengths[-1]}), {len(yaml)} YAML files"
    )
    found = too_long(functions, FUNCTION_MAX) + too_long(python, FILE_MAX)
    for where, n in yaml.items():
        found += too_long({where: n}, yaml_budget(where))
    for name, value, budget in (
        ("functions' median", median, FUNCTION_MEDIAN),
        ("90 % of functions", p90, FUNCTION_P90),
        ("files' median", file_median, FILE_MEDIAN),
    ):
        if value > budget:
            found.append(f"{name}: {value:g} lines, budget {budget}")
    return found


if __name__ == "__main__":
    over = problems(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(over) if over else "all within budget")
    sys.exit(bool(over))
