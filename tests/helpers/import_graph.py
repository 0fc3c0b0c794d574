"""Read which modules and packages of the project import which, by `ast` and without importing anything.

Imports inside functions and under `TYPE_CHECKING` count as well.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def module_name(path: Path) -> str:
    """Return the dotted name of a file, such as `"rewriters.ir.graph"`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for top in ("rewriters", "tflms_sft") for path in sorted((ROOT / top).rglob("*.py"))}


def imported_modules(path: Path, modules: Iterable[str]) -> set[str]:
    """Return the subset of `modules` that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            targets = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(target if target in modules else str(node.module) for target in targets)
    return names.intersection(modules)


@functools.cache
def module_imports() -> dict[str, set[str]]:
    """Return the imported modules per module."""
    return {name: imported_modules(path, FILES) - {name} for name, path in FILES.items()}


def package_of(module: str) -> str:
    """Return the package of a module, which is the module itself if it lies directly in a top folder."""
    return ".".join(module.split(".")[:2])


def package_imports() -> dict[str, set[str]]:
    """Return the imported packages per package."""
    graph: dict[str, set[str]] = {package_of(module): set() for module in FILES}
    for module, targets in module_imports().items():
        graph[package_of(module)] |= {package_of(target) for target in targets} - {package_of(module)}
    return graph


def transitive_reduction(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return an acyclic graph without the edges that a longer path implies."""

    def descendants(node: str) -> set[str]:
        return {target for child in graph[node] for target in (child, *descendants(child))}

    return {
        node: set(children) - {target for child in children for target in descendants(child)}
        for node, children in graph.items()
    }
