"""`make test-for`: each package has tests, and the table names tests that exist."""

import package_tests
from import_graph import FILES, ROOT

TABLE = package_tests.package_tests()


def test_each_package_has_tests():
    packages = {path.parent.name.lstrip("_") for path in FILES.values()}
    assert packages == TABLE.keys() and all(TABLE.values())


def test_table_names_tests_that_exist():
    for test in {test for tests in TABLE.values() for test in tests}:
        path, _, name = test.partition("::")
        assert (ROOT / "tests" / path).exists(), test
        if name:
            assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), test


def test_unknown_package_prints_the_known_ones(capsys):
    assert package_tests.main(["rules", "rule"]) == package_tests.main([]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("test-for: PKG names packages. Received: rule. Known: rewriters analysis batch_semantics ")
    assert second.startswith("test-for: PKG names packages. Known: rewriters ")
