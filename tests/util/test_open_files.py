"""Open files and their limit, on this system and on one that reports neither."""

import math
import sys

import pytest

from tflms_sft._util import open_files


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras."""


def test_open_descriptors_lists_an_open_file(tmp_path):
    with open(tmp_path / "file", "w") as file:
        assert file.fileno() in open_files.open_descriptors()
    assert file.closed and len(open_files.open_descriptors()) > 2


def test_open_descriptors_uses_second_folder_or_is_none(monkeypatch):
    monkeypatch.setattr(open_files, "_FOLDERS", ("/nonesuch", "/dev/fd"))
    assert 2 in open_files.open_descriptors()
    monkeypatch.setattr(open_files, "_FOLDERS", ("/nonesuch",))
    assert open_files.open_descriptors() is None


def test_open_descriptors_is_none_where_the_folder_has_the_first_three_alone(monkeypatch):
    monkeypatch.setattr(open_files, "_FOLDERS", ("/dev/fd",))
    monkeypatch.setattr(open_files.os, "listdir", lambda folder: ["0", "1", "2"])
    assert open_files.open_descriptors() is None


def test_open_file_limits_are_those_of_the_system_or_none(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: {resource.RLIMIT_NOFILE: (77, resource.RLIM_INFINITY)}[which]
    )
    assert open_files.open_file_limits() == (77, math.inf)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert open_files.open_file_limits() == (math.inf, math.inf)
