"""Graphs from text, in the form of `rewriters/ir/text.py`; a helper, no test.

Functions cannot be written: a graph with loops is traced.
"""

import ast
import re

import numpy as np
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node

LINE = re.compile(
    r"(?P<name>\S+) = (?P<results>\(.*?\) |\w+\[[^\]]*\] )?(?P<op>\w+)\((?P<operands>.*?)\)"
    r"(?: \{(?P<attrs>.*?)\})?(?: after \[(?P<after>.*?)\])?(?: on (?P<device>\S+))?(?:  # .*)?"
)
SPEC = re.compile(r"(\w+)\[([^\]]*)\]")


def parsed(text):
    """Return the graph that `text` describes: arguments, in one line or several, op lines, `effects`, and `return`."""
    graph = Graph({}, [], [], [], tf.compat.v1.GraphDef().library, tf.compat.v1.GraphDef().versions)
    waits = {}
    for line in map(str.strip, text.strip().splitlines()):
        if line in ("graph(", "):", ""):
            continue
        if line.startswith("graph("):
            for argument in _items(line[6:-1]):
                _argument(graph, argument)
            continue
        if line.startswith("effects "):
            graph.keep = [graph.nodes[name] for name in line[8:].split(", ")]
        elif re.match(r"return( |$)", line):
            graph.outputs = [_tensor(graph, name) for name in _items(line[6:].strip())]
        elif line.endswith(","):
            _argument(graph, line[:-1])
        else:
            node, before = _op(graph, line)
            waits[node] = before
    for node, before in waits.items():
        node.control_inputs = [graph.nodes[name] for name in before]
    return graph


def ops_of(text):
    """Return the lines of the ops of a graph's text, in order, without their indentation."""
    return [line.strip() for line in text.partition("):\n")[2].splitlines()]


def _argument(graph, line):
    name, spec = line.split(": ")
    handle, _, variable = spec.partition(" of ")
    dtype, shape = (tf.resource, ()) if variable else _specs(handle)[0]
    node = graph.add(Node(name, "Placeholder", attrs={"dtype": _type(dtype)}, outputs=[(dtype, shape)]))
    graph.inputs.append(node.out())
    if variable:
        graph.variables[name] = _specs(variable)[0]


def _op(graph, line):
    match = LINE.fullmatch(line)
    assert match, line
    outputs = _specs(match["results"] or "")
    operands = [_tensor(graph, item) for item in _items(match["operands"])]
    attrs = _attrs(match["op"], _items(match["attrs"] or ""), operands, outputs)
    node = Node(match["name"], match["op"], operands, attrs=attrs, device=match["device"] or "", outputs=outputs)
    return graph.add(node), _items(match["after"] or "")


def _items(text):
    """Split at commas outside of brackets."""
    items, depth = [""], 0
    for part in re.split(r"(, |\[|\])", text):
        depth += (part == "[") - (part == "]")
        items[len(items) :] = [""] if part == ", " and not depth else []
        items[-1] += part if part != ", " or depth else ""
    return [item for item in items if item]


def _specs(text):
    def size(part):
        return None if part == "?" else int(part)

    return [
        (tf.as_dtype(name), None if dims == "..." else tuple(map(size, filter(None, dims.split(",")))))
        for name, dims in SPEC.findall(text)
    ]


def _type(dtype):
    return tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)


def _types(dtypes):
    return tf.compat.v1.AttrValue(
        list=tf.compat.v1.AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in dtypes])
    )


def _tensor(graph, text):
    """Return the tensor of a name, or a constant for a literal."""
    literal = re.fullmatch(r"(?:(\w+):)?([-\[\d].*|True|False)", text)
    if literal and text.partition(":")[0] not in graph.nodes:
        value = ast.literal_eval(literal[2])
        kind = np.asarray(value).dtype.kind if value != [] else "i"
        dtype = tf.as_dtype(literal[1] or {"f": "float32", "i": "int32", "b": "bool"}[kind])
        return _constant(graph, graph.unique_name("literal"), np.asarray(value, dtype.as_numpy_dtype)).out()
    name, _, index = text.partition(":")
    return graph.nodes[name].out(int(index or 0))


def _constant(graph, name, value):
    dtype = tf.as_dtype(value.dtype)
    attrs = {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(value)), "dtype": _type(dtype)}
    return graph.add(Node(name, "Const", attrs=attrs, outputs=[(dtype, value.shape)]))


def _attrs(op, items, operands, outputs):
    """Return all attributes: those written, types of operands and results, and defaults."""
    definition = tf_internals.op_def_registry.get(op)
    given = dict(item.split("=", 1) for item in items)
    attrs = {attr.name: attr.default_value for attr in definition.attr if attr.HasField("default_value")}
    remaining = list(operands)
    for position, argument in enumerate(definition.input_arg):
        count = len(remaining) - len(definition.input_arg) + position + 1
        count = count if argument.number_attr or argument.type_list_attr else 1
        if argument.type_list_attr:
            attrs[argument.type_list_attr] = _types(tensor.dtype for tensor in remaining[:count])
        if argument.type_attr:
            attrs[argument.type_attr] = _type(remaining[0].dtype)
        if argument.number_attr:
            attrs[argument.number_attr] = tf.compat.v1.AttrValue(i=count)
        del remaining[:count]
    for argument, (dtype, _) in zip(definition.output_arg, outputs, strict=False):
        if argument.type_list_attr:
            attrs[argument.type_list_attr] = _types(dtype for dtype, _ in outputs)
        elif argument.type_attr:
            attrs[argument.type_attr] = _type(dtype)
    for attr in definition.attr:
        if attr.name in given:
            attrs[attr.name] = _attr(attr.type, given[attr.name], outputs)
    return attrs


def _attr(kind, text, outputs):
    value = tf.compat.v1.AttrValue()
    if kind == "tensor":
        dtype, shape = outputs[0]
        array = np.asarray(ast.literal_eval(text), dtype.as_numpy_dtype).reshape(shape)
        value.tensor.CopyFrom(tf.make_tensor_proto(array))
    elif kind == "shape":
        value.shape.CopyFrom(tf.TensorShape(_specs(f"x{text}")[0][1] if text != "[...]" else None).as_proto())
    else:
        python = ast.literal_eval(text)
        listed = isinstance(python, list)
        field = {"string": "s", "int": "i", "float": "f", "bool": "b"}[kind.removeprefix("list(").removesuffix(")")]
        items = [item.encode() if isinstance(item, str) else item for item in (python if listed else [python])]
        if listed:
            getattr(value.list, field).extend(items)
        else:
            setattr(value, field, items[0])
    return value
