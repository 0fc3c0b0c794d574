"""Open files and their limit, on this system and on one that reports neither."""

import math
import sys

import pytest

from tflms_sft._util import open_files


def test_open_descriptors_lists_an_open_file(tmp_path):
    with open(tmp_path / "file", "w") as file:
        assert file.fileno() in open_files.open_descriptors()
    assert file.closed and len(open_files.open_descriptors()) > 2


def test_open_descriptors_uses_second_folder_or_is_none(tmp_path):
    assert 2 in open_files.open_descriptors(("/nonesuch", "/dev/fd"))
    assert open_files.open_descriptors(("/nonesuch",)) is None
    for first in "012":  # The folder of FreeBSD without `fdescfs`.
        (tmp_path / first).touch()
    assert open_files.open_descriptors((str(tmp_path),)) is None


def test_open_file_limits_are_those_of_the_system_or_none(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = (
        math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    assert open_files.open_file_limits() == tuple(limits)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert open_files.open_file_limits() == (math.inf, math.inf)
