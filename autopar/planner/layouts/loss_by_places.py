"""Losses over rows and places at once, ``[(batch sequence) vocabulary]``, written over both dims, to be priced.

Frameworks with context parallelism take the loss of the places that a rank has. A dim ``(batch sequence)`` can be cut
by rows, and not by places of a sequence too, so logits of such a model would be gathered first. What the framework runs
is what the model runs with a loss over ``[batch vocabulary sequence]``: a layout of that model is priced, and its plan
says that it is not one of the module as it is.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.words.graph import Graph, Node, Ref

LOSS = "aten.cross_entropy_loss.default"
RESHAPE, PERMUTE = "aten.reshape.default", "aten.permute.default"
REDUCTION = 3
"""Position of the argument that says whether losses are added up; by default their mean is taken."""


def with_loss_by_places(graph: Graph) -> Graph:
    """Return the graph with losses over both dims; the same where none is over rows and places of several sequences."""
    known = graph.derived.get("loss by places")
    if known is None:
        known = graph.derived["loss by places"] = _by_places(graph)
    return known  # type: ignore[no-any-return]


def _by_places(graph: Graph) -> Graph:
    losses = {i: sources for i, _ in graph.of_kind("op") if (sources := _sources(graph, i)) is not None}
    if not losses:
        return graph
    unread = {
        ref.node for i in losses for ref in graph.nodes[i].refs
        if ref not in graph.outputs and all(user in losses for user, _ in graph.consumers[ref])
    }  # fmt: skip
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for i, node in enumerate(graph.nodes):
        at = len(nodes)
        if i in unread:
            continue
        if i in losses:
            logits, labels = losses[i]
            spec = graph.spec(logits)
            rows, places, classes = spec.shape
            turned = replace(
                graph.nodes[logits.node], name=f"{node.name}_by_places", kind="op", target=PERMUTE,
                args=(moved[logits], [0, 2, 1]), kwargs={}, outs=(spec._replace(shape=(rows, classes, places)),),
                module=node.module, source=node.source, again=node.again, rows=(), load=(),
            )  # fmt: skip
            nodes.append(turned)
            nodes.append(replace(node, args=(Ref(at), moved[labels], *node.args[2:])))
            at += 1
        else:
            nodes.append(node.moved(moved.__getitem__) if node.refs else node)
        for out in range(len(node.outs)):
            moved[Ref(i, out)] = Ref(at, out)
    outputs = tuple(moved[out] if isinstance(out, Ref) else out for out in graph.outputs)
    return replace(
        graph, nodes=tuple(nodes), outputs=outputs,
        updates={name: moved[ref] for name, ref in graph.updates.items()},
    )  # fmt: skip


def _sources(graph: Graph, i: int) -> tuple[Ref, Ref] | None:
    """Return the logits ``[batch sequence vocabulary]`` and labels ``[batch sequence]`` of a summed loss."""
    node = graph.nodes[i]
    if node.target != LOSS or len(node.args) < 2 or (len(node.args) > REDUCTION and node.args[REDUCTION] == 0):
        return None
    if any(isinstance(arg, Ref) for arg in node.args[2:]):  # weights of classes
        return None
    refs = []
    for arg in node.args[:2]:
        maker = graph.nodes[arg.node] if isinstance(arg, Ref) else None
        if maker is None or maker.target != RESHAPE:
            return None
        refs.append(maker.refs[0])
    logits, labels = (graph.spec(ref).shape for ref in refs)
    right = len(logits) == 3 and labels == logits[:2] and logits[0] > 1
    return (refs[0], refs[1]) if right and graph.nodes[i].refs[0].out == 0 else None
