"""`tflms-sft doctor`."""

import json
import re

import tensorflow as tf


def test_doctor_on_supported_machine_is_ok(cli):
    code, out, _ = cli("doctor", "--json")
    found = json.loads(out)
    lines = {line["name"]: line for line in found["lines"]}
    assert (code, found["ok"]) == (0, True)
    assert {"Python", "tensorflow", "keras", "numpy", "memory", "devices", "XLA", "spill directory"} <= set(lines)
    for name in ("small step, tiles", "small step, swaps"):
        assert lines[name]["status"] == "ok" and re.match(r"[1-9]\d* (segment|tensor)\(s\); ", lines[name]["text"])
    assert lines["tensorflow"]["text"] == tf.__version__


def test_doctor_tiles_small_step_beside_kernel_scratch(cli, plan_with):
    """TensorFlow's own kernels take as much scratch memory as a cache has, which other tests leave out."""
    plan_with(l3_bytes=30 * 2**20, last_level_cache_bytes=30 * 2**20)
    code, out, _ = cli("doctor")
    assert code == 0 and re.search(r"^ok +small step, tiles +1 segment\(s\); ", out, flags=re.MULTILINE)


def test_doctor_with_wrong_results_fails(cli, monkeypatch):
    monkeypatch.setattr("tflms_sft._cli.doctor.MAX_RELATIVE_ERROR", -1.0)
    code, out, _ = cli("doctor", "--spill-dir", "none")
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert code == 1 and out.endswith(f"{len(failed)} of {len(out.splitlines()) - 1} FAILED\n")
    for pattern in ("spill directory .*'none'", "small step, tiles .* differ", "small step, swaps .*'none'"):
        assert any(re.search(pattern, line) for line in failed), pattern


def test_doctor_with_old_or_missing_packages_fails_without_further_checks(cli, monkeypatch):
    supported = {"tensorflow": ((2, 90), (2, 91)), "nonesuch": ((1, 0), (2, 0))}
    monkeypatch.setattr("tflms_sft._util.requirements.SUPPORTED_RELEASES", supported)
    code, out, _ = cli("doctor")
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    install = 'pip install --upgrade "tensorflow>=2.90,<3" "nonesuch>=1.0,<3"'
    assert code == 1 and [" ".join(line.split()) for line in failed] == [
        f"FAILED tensorflow {tf.__version__}; supported: 2.90 to 2.91; install with: {install}",
        f"FAILED nonesuch not installed; install it with: {install}",
    ]
    assert "small step" not in out and "; other checks need supported versions of TensorFlow and Keras, and " in out


def test_doctor_with_another_backend_fails_without_further_checks(cli, monkeypatch):
    monkeypatch.setattr("tflms_sft._util.requirements.keras_backend", lambda: "jax")
    code, out, _ = cli("doctor")
    remedy = 'Set the environment variable KERAS_BACKEND="tensorflow"'
    assert code == 1 and "small step" not in out
    assert f"FAILED  Keras backend  jax; only TensorFlow graphs can be rewritten. {remedy}\n" in out
    assert out.endswith(
        "1 of 9 FAILED; other checks need supported versions of TensorFlow and Keras, and TensorFlow as its backend\n"
    )


def test_doctor_with_newer_packages_prints_note(cli, monkeypatch):
    monkeypatch.setattr(
        "tflms_sft._util.requirements.SUPPORTED_RELEASES", {"tensorflow": ((2, 0), (2, 1)), "keras": ((3, 0), (9, 0))}
    )
    monkeypatch.setattr("tflms_sft._cli.doctor.PYTHON_RELEASES", ((3, 0), (3, 1)))
    code, out, _ = cli("doctor", "--json")
    lines = {line["name"]: (line["status"], line["text"]) for line in json.loads(out)["lines"]}
    assert code == 0 and lines["small step, tiles"][0] == "ok"
    assert lines["tensorflow"] == ("note", f"{tf.__version__}; newer than the tested versions, 2.0 to 2.1")
    assert lines["Python"][0] == "note" and lines["Python"][1].endswith("; newer than the tested versions, 3.0 to 3.1")
