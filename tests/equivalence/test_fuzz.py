"""The first of the random networks of `fuzz.py`; `make fuzz` runs others."""

import collections

import fuzz
import pytest

from rewriters.rules.intervals import Window


def test_fuzz_networks_equal_plain_or_are_refused():
    outcomes = collections.Counter()
    fuzz.run(6, None, outcomes, shrink=False)
    assert outcomes.total() == 6 and outcomes["exact"] > 2, outcomes


def test_fuzz_finds_broken_rule(monkeypatch, capsys):
    gather = Window.rows_covered
    monkeypatch.setattr(Window, "rows_covered", lambda self, rows: gather(self, rows).shift(-1))
    with pytest.raises(AssertionError, match="differs by|lacks rows|lacks the dimension"):
        fuzz.run(100, None, collections.Counter(), shrink=False)
    script = capsys.readouterr().out
    assert "compare(keras.Model(" in script and "PYTHONPATH=tests:." in script
