"""Rates of a machine as a test wants them, in a file that the environment names."""

import dataclasses

import pytest

from rewriters.estimates.op_cost import NOMINAL
from tflms_sft._machine.calibration import VARIABLE, Calibration


@pytest.fixture
def set_rates(monkeypatch, tmp_path_factory):
    """Return a function that changes some of the nominal rates."""

    def set_rates(**changes):
        monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("rates") / "rates.json"))
        Calibration(lambda: dataclasses.replace(NOMINAL, **changes)).machine_rates()

    return set_rates
