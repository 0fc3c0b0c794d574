"""Imports between packages go one way, and no two files import each other, directly or through others.

Imports inside of functions and under `TYPE_CHECKING` count as well.
"""

from collections.abc import Iterable, Iterator, Mapping

from import_graph import FILES, module_imports, package_of

ORDER = (
    "rewriters",
    "rewriters.errors",
    "rewriters.ir",
    "rewriters.device",
    "rewriters.rules",
    "rewriters.analysis",
    "rewriters.canonicalize",
    "rewriters.scheduling",
    "rewriters.tiling",
    "rewriters.swapping",
    "rewriters.emission",
    "rewriters.estimates",
    "rewriters.step_importer",
    "rewriters.pipelining",
    "rewriters.batch_semantics",
    "tflms_sft._version",
    "tflms_sft._util",
    "tflms_sft._sources",
    "tflms_sft._machine",
    "tflms_sft._cluster",
    "tflms_sft._params",
    "tflms_sft._trace",
    "tflms_sft._report",
    "tflms_sft._search",
    "tflms_sft._barriers",
    "tflms_sft._planner",
    "tflms_sft._pipeline",
    "tflms_sft._batches",
    "tflms_sft._rewrite",
    "tflms_sft._keras",
    "tflms_sft._verify",
    "tflms_sft",
    "tflms_sft._image_tiles",
    "tflms_sft.gems",
    "tflms_sft.unets",
    "tflms_sft._cli",
    "tflms_sft.__main__",
)
"""Packages, and modules beside them: each may import itself and those above it."""

ENTRANCES = {"rewriters.batch_semantics": {"tflms_sft._pipeline"}}
"""Packages that only some others may import."""

MAX_FILES, MAX_LINES = 14, 600
"""Files of a package, lines of a file."""


def circles(imports: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Yield a path from each node to itself, if there is one."""
    for start in imports:
        paths, seen = [[start]], set()
        while paths:
            path = paths.pop()
            for target in imports[path[-1]]:
                if target == start:
                    yield [*path, start]
                elif target not in seen:
                    seen.add(target)
                    paths.append([*path, target])


def test_circles_finds_the_ring_and_none_in_a_chain():
    assert not list(circles({"a": "b", "b": "c", "c": ""}))
    assert ["a", "b", "a"] in list(circles({"a": "b", "b": "a"}))


def test_order_lists_the_package_of_every_module():
    assert {package_of(module) for module in FILES} == set(ORDER)


def test_files_have_no_import_circle():
    assert [" -> ".join(circle) for circle in circles(module_imports())] == []


def test_packages_import_only_packages_above_them():
    assert [
        f"{module} imports {target}"
        for module, targets in module_imports().items()
        for target in targets
        if ORDER.index(package_of(module)) < ORDER.index(package_of(target))
    ] == []


def test_packages_with_one_entrance_are_imported_by_nothing_else():
    for package, users in ENTRANCES.items():
        importers = {
            package_of(m) for m, targets in module_imports().items() if any(package_of(t) == package for t in targets)
        }
        assert importers - {package} == users
        outside = {t for m, targets in module_imports().items() if package_of(m) != package for t in targets}
        assert {t for t in outside if package_of(t) == package} == {package}, "import what its `__init__` exports"


def test_packages_and_files_are_small():
    sizes = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}
    folders = [path.parent for path in FILES.values()]
    assert {str(folder) for folder in folders if folders.count(folder) > MAX_FILES} == set()
