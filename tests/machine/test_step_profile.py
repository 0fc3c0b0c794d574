"""Time of the ops of a step."""

import pytest
import tensorflow as tf

from tflms_sft._machine.step_profile import op_of, profiled, shared_time


def test_concurrent_ops_share_their_time():
    spans = [("a", 1.0, 5.0), ("b", 2.0, 4.0), ("a", 3.0, 4.0), ("c", 7.0, 8.0), ("d", 7.0, 7.0)]
    want = {"a": 1 + 1 / 2 + 2 / 3 + 1, "b": 1 / 2 + 1 / 3, "c": 1.0, "d": 0.0}
    assert shared_time(spans) == pytest.approx(want)


def test_profile_has_result_and_ops():
    step = tf.function(lambda x: tf.linalg.matmul(x, x, name="product"))
    image = tf.ones((200, 200))
    step(image)
    result, spans = profiled(lambda: step(image))
    assert float(result[0, 0]) == 200
    (product,) = [span for span in spans if span.name.endswith("product")]
    assert product.op == "MatMul" and product.end > product.begin


def test_second_profile_is_refused_and_first_one_goes_on(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    with pytest.raises(tf.errors.AlreadyExistsError):
        profiled(lambda: pytest.fail("must not run"))
    tf.profiler.experimental.stop()
    assert list(tmp_path.glob("**/*.xplane.pb"))


def test_ops_are_told_from_other_events():
    assert op_of("sft/segment1/conv:_FusedConv2D") == ("sft/segment1/conv", "_FusedConv2D")
    assert op_of("ExecutorState::Process") is None and op_of("sft/while:While") is None
