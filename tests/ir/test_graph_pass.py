"""The contract of passes: each check of the runner fails for a pass that breaks it, and for no other."""

import pytest
import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir import graph_pass
from rewriters.ir.graph import Graph, Node
from rewriters.ir.graph_pass import GraphPass, PassError, PassResult, check_interface, run_pass, run_passes
from rewriters.ir.static_values import op_attrs


def step_graph():
    """Build a graph that doubles its argument, assigns it to a variable and then counts."""
    graph = Graph({}, [], [], [], tf.compat.v1.GraphDef().library, None)
    image = graph.add(Node("image", "Placeholder", outputs=[(tf.float32, (None, 4))]))
    handle = graph.add(Node("variable", "Placeholder", outputs=[(tf.resource, ())]))
    attrs = op_attrs(T=tf.float32)
    double = graph.add(
        Node("double", "AddV2", [image.out(), image.out()], attrs=attrs, outputs=[(tf.float32, (None, 4))])
    )
    assign = graph.add(Node("assign", "AssignVariableOp", [handle.out(), double.out()]))
    count = graph.add(Node("count", "AssignAddVariableOp", [handle.out(), image.out()], control_inputs=[assign]))
    graph.inputs, graph.outputs, graph.keep = [image.out(), handle.out()], [double.out()], [assign, count]
    return graph


class EditPass(GraphPass[PassResult]):
    """Applies an edit to a copy of its graph."""

    def __init__(self, edit):
        self.edit = edit

    def call(self, graph):
        new = graph.copy()
        self.edit(new)
        return PassResult(new, changed=True, notes=("edited",))


class ReturnPass(GraphPass[PassResult]):
    """Returns what a function makes of its graph."""

    def __init__(self, result):
        self.result = result

    def call(self, graph):
        return self.result(graph)


def wait(graph):
    graph.nodes["assign"].control_inputs.append(graph.nodes["image"])


def refused(edit):
    with pytest.raises(PassError) as error:
        run_pass(EditPass(edit), step_graph())
    return str(error.value)


def test_run_passes_valid_passes_return_last_graph_and_all_notes():
    graph = step_graph()
    result = run_passes(graph, [EditPass(wait), ReturnPass(lambda g: PassResult(g, changed=False, notes=("same",)))])
    assert result.changed and result.notes == ("edited", "same")
    assert [n.name for n in result.graph.nodes["assign"].control_inputs] == ["image"]
    assert not graph.nodes["assign"].control_inputs


def test_run_passes_no_pass_changes_returns_given_graph():
    graph = step_graph()
    result = run_passes(graph, [ReturnPass(lambda g: PassResult(g, changed=False))] * 2)
    assert result.graph is graph and not result.changed


def test_run_passes_broken_contract_names_pass_and_those_before():
    broken = EditPass(lambda graph: graph.outputs.clear())
    with pytest.raises(PassError, match=r"`EditPass` broke its contract: .* ran before: ReturnPass, EditPass\."):
        run_passes(step_graph(), [ReturnPass(lambda g: PassResult(g, changed=False)), EditPass(wait), broken])


def test_run_passes_refusal_in_pass_is_passed_on():
    def refuse(graph):
        raise RewriteError("no")

    with pytest.raises(RewriteError, match=r"^no$"):
        run_passes(step_graph(), [EditPass(wait), ReturnPass(refuse)])


def test_run_passes_error_in_pass_keeps_type_and_names_pass():
    def fail(graph):
        raise KeyError("no")

    with pytest.raises(KeyError) as error:
        run_passes(step_graph(), [EditPass(wait), ReturnPass(fail)])
    lines = [*str(error.value.args[0]).split("\n"), *getattr(error.value, "__notes__", ())]  # Python 3.10 has no notes.
    assert lines == ["no", "Raised in the pass `ReturnPass`. Passes that ran before: EditPass."]


def move(graph):
    graph.nodes["double"].device = "/device:GPU:0"


@pytest.mark.parametrize(("change", "full"), [(wait, False), (wait, True), (move, True)])
def test_run_pass_edit_of_given_graph_is_refused(change, full, monkeypatch):
    monkeypatch.setattr(graph_pass, "FULL_CHECKS", full)

    def edit(graph):
        change(graph)
        return PassResult(graph, changed=False)

    with pytest.raises(PassError, match="edited the graph that it was given"):
        run_pass(ReturnPass(edit), step_graph())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda g: PassResult(g, changed=True), "returned the given graph and `changed` is true"),
        (lambda g: PassResult(g.copy(), changed=False), "returned another graph and `changed` is false"),
        (lambda g: PassResult(g.copy(), changed=True), "returned an equal graph and `changed` is true"),
    ],
)
def test_run_pass_wrong_changed_is_refused(result, message):
    with pytest.raises(PassError, match=message):
        run_pass(ReturnPass(result), step_graph())


def test_run_pass_different_argument_is_refused():
    def edit(graph):
        graph.nodes["image"].outputs = [(tf.float32, (None, 5))]

    assert "its arguments differ" in refused(edit)


def test_run_pass_missing_captured_variable_is_refused():
    assert "has 0 captured variables instead of 1" in refused(lambda graph: graph.inputs.pop())


def test_run_pass_result_of_other_type_is_refused():
    def edit(graph):
        graph.nodes["double"].outputs = [(tf.float64, (None, 4))]

    assert "its results differ" in refused(edit)


def test_run_pass_result_with_more_known_shape_is_accepted():
    def edit(graph):
        graph.nodes["double"].outputs = [(tf.float32, (3, 4))]

    assert run_pass(EditPass(edit), step_graph()).changed


def test_run_pass_second_producer_of_a_value_is_refused():
    def edit(graph):
        other = Node("double", "AddV2", graph.nodes["double"].inputs, outputs=graph.nodes["double"].outputs)
        graph.nodes["assign"].inputs[1] = other.out()

    assert "reads `double:0`, which no node of the graph produces" in refused(edit)


def test_run_pass_control_edge_from_outside_is_refused():
    def edit(graph):
        graph.nodes["assign"].control_inputs.append(Node("elsewhere", "NoOp"))

    assert "waits for `elsewhere`, which is not in the graph" in refused(edit)


def test_run_pass_cycle_is_refused_by_full_checks():
    def edit(graph):
        graph.nodes["double"].control_inputs.append(graph.nodes["assign"])

    assert "cycle" in refused(edit)


def test_run_pass_missing_stateful_op_is_refused():
    def edit(graph):
        graph.keep.remove(graph.nodes.pop("count"))

    assert "stateful ops are missing: ['count']" in refused(edit)


def test_run_pass_repeated_stateful_op_is_refused():
    def edit(graph):
        assign = graph.nodes["assign"]
        graph.add(Node("again", assign.op, assign.inputs, control_inputs=[assign]))

    assert "stateful ops are new: ['again']" in refused(edit)


def test_run_pass_declared_stateful_op_is_accepted():
    edit = EditPass(lambda graph: graph.keep.append(graph.add(Node("buffer", "Empty"))))
    edit.new_stateful_ops = frozenset(("Empty",))
    assert run_pass(edit, step_graph()).changed


def test_run_pass_stateful_ops_out_of_order_are_refused_by_full_checks():
    assert "`count` no longer runs after `assign`" in refused(lambda graph: graph.nodes["count"].control_inputs.clear())


def test_run_pass_requires_fails_names_pass():
    class Demanding(EditPass):
        def requires(self, graph):
            raise PassError("it needs a loop")

    with pytest.raises(PassError, match="`Demanding` broke its contract: it needs a loop"):
        run_pass(Demanding(wait), step_graph())


def test_run_pass_own_ensures_replaces_interface_check():
    class Unrolling(EditPass):
        def ensures(self, before, after):
            check_interface(before, after, same_shapes=False)

    def edit(graph):
        graph.nodes["image"].outputs = [(tf.float32, (8, 5))]

    assert run_pass(Unrolling(edit), step_graph()).changed
