"""Lines of notation: what they bind to, what they refuse, and the options that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import RuleError
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.building.space import fitting_strategy, strategies
from autopar.rules.axis_options import axis_options
from autopar.rules.local_calls import cuts_of, local_call
from autopar.rules.notation import Comm, Lowering, Rule, line
from autopar.rules.operator_call import Call, In, call_of
from autopar.rules.terms import bind
from autopar.words.graph import Graph, Node, Ref, Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from cost_models import mesh_axes
from hardware_profiles import load_cluster


def call(
    ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], *args: object, target: str = "aten.x.default"
) -> Call:
    specs = [Spec(shape, "float32") for shape in (*ins, *outs)]
    return Call(target, args or tuple(map(In, range(len(ins)))), {}, tuple(specs[: len(ins)]), tuple(specs[len(ins) :]))


def options(rule: Rule, grads: bool = True) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    found = axis_options(rule, [grads] * len(rule.inputs), [grads] * len(rule.outputs))
    return {o.name: (o.ins, o.outs) for o in found}


def test_dots_are_the_leading_dims_aligned_at_the_right() -> None:
    sizes, (x, w), (y,) = bind("... k, n k -> ... n", [(2, 3, 5), (7, 5)], [(2, 3, 7)])
    assert sizes == {"b": 2, "s": 3, "k": 5, "n": 7}
    assert x == (("b",), ("s",), ("k",)) and w == (("n",), ("k",)) and y == (("b",), ("s",), ("n",))


def test_dots_of_different_lengths_share_the_last_dims() -> None:
    sizes, (x, y), (z,) = bind("..., ... -> ...", [(4, 6, 8), (6, 1)], [(4, 6, 8)])
    assert z == (("b",), ("s",), ("t",)) and x == z
    assert y == (("s",), ()), "a dim of size 1 is a broadcast"
    assert sizes == {"b": 4, "s": 6, "t": 8}


def test_names_of_leading_dims_avoid_the_lines_own() -> None:
    sizes, (x,), _ = bind("... s b -> ... b", [(3, 2, 5, 7)], [(3, 2, 7)])
    assert x == (("t",), ("u",), ("s",), ("b",)) and sizes == {"t": 3, "u": 2, "s": 5, "b": 7}


def test_more_dims_than_letters() -> None:
    shape = tuple(range(2, 12))
    sizes, (x,), _ = bind("... s -> ... s", [shape], [shape])
    assert len(set(x)) == 10 and [sizes[f] for (f,) in x] == list(shape)


def test_composite_sizes_follow_from_the_other_tensors() -> None:
    sizes, (x,), (y,) = bind("b s (h d) -> b s h d", [(2, 3, 32)], [(2, 3, 4, 8)])
    assert sizes == {"b": 2, "s": 3, "h": 4, "d": 8} and x[2] == ("h", "d") and y[2:] == (("h",), ("d",))


def test_composite_sizes_can_be_given() -> None:
    sizes, _, _ = bind("(c k) -> (k c)", [(12,)], [(12,)], {"k": 3})
    assert sizes == {"c": 4, "k": 3}


@pytest.mark.parametrize(
    "text, ins, outs, message",
    [
        ("a, b -> a b", [(2,)], [(2, 3)], r"rule 'a, b -> a b' describes 3 tensors, the call has 2"),
        ("a b -> a b", [(2, 3, 4)], [(2, 3, 4)], r"a term with 2 dims meets a tensor of shape \(2, 3, 4\)"),
        ("a b -> b a", [(2, 3)], [(2, 3)], r"\('b',\) has sizes \[3\], the tensor has 2"),
        ("a 1 -> a", [(2, 3)], [(2,)], r"\(\) has sizes \[\], the tensor has 3"),
        ("h (h d) -> h d", [(4, 30)], [(4, 8)], r"dim of size 30 is no multiple of 4"),
        ("(h d) -> (d h)", [(6,)], [(6,)], r"sizes of \('h', 'd'\) do not follow from the shapes"),
    ],
)
def test_contradictions_are_named(text: str, ins: list, outs: list, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        bind(text, ins, outs)


@pytest.mark.parametrize(
    "text, message, at",
    [
        ("a b, c", "'->' is missing", 6),
        ("a -> b -> c", "a second '->'", 7),
        ("a (b c -> d", r"'->' inside of parentheses", 7),
        ("a -> (b c", r"'\(' is not closed", 5),
        ("a b) -> a", r"'\)' without '\('", 3),
        ("a () -> a", r"'\(\)' holds no factor", 2),
        ("(a (b c)) -> a", r"'\(' inside of parentheses", 3),
        ("a 12 -> a", "'2' is nothing of the notation", 3),
        ("a * b -> a", r"'\*' is nothing of the notation", 2),
        ("... a ... -> a", r"'...' stands twice in one term", 6),
        ("a .. -> a", "'.' is nothing of the notation", 2),
    ],
)
def test_mistakes_in_a_line_are_pointed_at(text: str, message: str, at: int) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        bind(text, [(2,)], [(2,)])
    _, line_shown, mark = str(caught.value).split("\n")
    assert line_shown.strip() == text and mark.index("^") - line_shown.index(text) == at


def _product(**options: object) -> Rule:
    return line("... k, n k -> ... n", call([(2, 6), (8, 6)], [(2, 8)]), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"whole": "m"}, "whole names 'm'"),
        ({"lowerings": (Lowering(max, frozenset("q")),)}, "lowerings names 'q'"),
        ({"lowerings": (Lowering(max, frozenset("k"), (Comm("k", "all_reduce", ("z",), 4),)),)}, "comm names 'z'"),
        ({"linear": [{2}]}, "there is no input 2, it has 2"),
        ({"saves": (0, 5)}, "there is no input 5"),
        ({"kind": "matmull"}, "'matmull' is no kind of operator"),
    ],
)
def test_rules_are_checked_when_made(options: dict, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        _product(**options)
    with pytest.raises(RuleError, match="'allreduce' is no collective"):
        Comm("k", "allreduce", (), 4)


def test_each_factor_has_its_lowering() -> None:
    one, both = Lowering(min, frozenset("k")), Lowering(max, frozenset("kn"))
    rule = _product(lowerings=(both, one))
    assert rule.lowering("b") is None
    assert rule.lowering("bk") is one, "the one for the fewest factors"
    assert rule.lowering("n") is both and rule.lowering("kn") is both
    apart = _product(lowerings=(one, Lowering(max, frozenset("n"))))
    assert apart.can_lower("k") and apart.can_lower("nb") and not apart.can_lower("kn")
    with pytest.raises(RuleError, match="nothing cuts k and n at once"):
        apart.lowering("kn")
    drawing = Lowering(sum)
    rule = _product(random=True, lowerings=(one, drawing))
    assert rule.lowering("") is drawing and rule.lowering("b") is drawing and rule.lowering("k") is one


def _small_product() -> tuple[Graph, Node, Rule]:
    """A product of [4 6] and [8 6], with its rule."""
    specs = {"a": (4, 6), "b": (8, 6)}
    inputs = [Node(name, "input", name, outs=(Spec(shape, "float32"),)) for name, shape in specs.items()]
    args = (Ref(0, 0), Ref(1, 0))
    node = Node("y", "op", "aten.x.default", args, outs=(Spec((4, 8), "float32"),), needs_grad=True)
    graph = Graph((*inputs, node), ())
    return graph, node, line("m k, n k -> m n", call_of(node, graph.spec), kind="matmul", flops=2.0)


def test_collectives_beside_compute_cost_what_is_longer() -> None:
    graph, node, rule = _small_product()
    mesh, cluster = Mesh.of(data=4), load_cluster("local-x4")

    def seconds(**how: Any) -> float:
        comms = tuple(Comm("m", "all_gather", ("m", "k"), 4, backward, **how) for backward in (False, True))
        cut = replace(rule, lowerings=(Lowering(min, frozenset("m"), comms),))
        strategy = fitting_strategy(graph, node, cut, mesh, ("m",))
        assert strategy is not None
        compute, inside = pricer(cluster, mesh).op(graph, node, cut, strategy)
        assert compute == pytest.approx(alone)
        return inside

    plain = fitting_strategy(graph, node, rule, mesh, ("m",))
    assert plain is not None
    alone, nothing = pricer(cluster, mesh).op(graph, node, rule, plain)
    forward, _ = pricer(cluster, mesh).forward(graph, node, rule, plain)
    one = mesh_axes(cluster, mesh.size_of)["data"].seconds("all_gather", 1 * 6 * 4)
    assert nothing == 0 and one > forward > 0
    assert seconds() == pytest.approx(2 * one)
    assert seconds(in_ring=True) == pytest.approx(2 * 3 * one)
    backward = alone - forward
    assert seconds(in_ring=True, overlaps=True) == pytest.approx(
        max(0, 3 * one - forward) + max(0, 3 * one - backward)
    )


def test_strategies_that_nothing_lowers_are_not_offered() -> None:
    graph, node, rule = _small_product()
    mesh = Mesh.of(data=2, tensor=2)
    lowerings = (Lowering(min, frozenset("k"), uneven=True), Lowering(max, frozenset("n"), uneven=True))
    apart = replace(rule, lowerings=lowerings)
    names = {s.names for s in strategies(graph, node, apart, mesh)}
    assert names == {s.names for s in strategies(graph, node, rule, mesh)} - {("k", "n"), ("n", "k")}


def test_line_without_inputs() -> None:
    assert line("-> a b", call([], [(2, 3)])).inputs == ()


def test_a_rule_prints_as_its_line() -> None:
    rule = line("b s (h d) -> b s h d", call([(2, 3, 32)], [(2, 3, 4, 8)]), whole="d s")
    assert str(rule) == "b s (h d) -> b s h d   whole: d s"


def test_only_major_factors_can_be_cut() -> None:
    assert line("b (h d) -> b h d", call([(2, 32)], [(2, 4, 8)])).cuttable == ("b", "h")
    assert line("(h d) -> (d h)", call([(6,)], [(6,)]), sizes={"h": 2}).cuttable == ()


def test_a_major_factor_of_size_one_blocks_nothing() -> None:
    assert line("b (h d) -> b h d", call([(2, 8)], [(2, 1, 8)])).cuttable == ("b", "d")


def test_whole_factors_are_not_cut() -> None:
    assert line("b s -> b s", call([(2, 4)], [(2, 4)]), whole="s").cuttable == ("b",)


def test_options_of_a_product() -> None:
    rule = line("... k, n k -> ... n", call([(2, 6), (8, 6)], [(2, 8)]), linear=[{0}, {1}])
    assert options(rule) == {
        "I": (("I", "I"), ("I",)),
        "b": (("S0", "R"), ("S0",)),
        "n": (("R", "S0"), ("S1",)),
        "k": (("S1", "S1"), ("P",)),
        "R": (("R", "R"), ("R",)),
        "P0": (("P", "R"), ("P",)),
        "P1": (("R", "P"), ("P",)),
    }


def test_a_bias_is_pending_where_the_sum_is() -> None:
    rule = line("... k, n k, n -> ... n", call([(2, 6), (8, 6), (8,)], [(2, 8)]), additive={2})
    found = options(rule)
    assert found["k"] == (("S1", "S1", "P"), ("P",))
    assert found["n"] == (("R", "S0", "S0"), ("S1",)), "cut with the output, not added"
    assert found["b"] == (("S0", "R", "R"), ("S0",)), "whole where nothing is summed"


def test_without_gradients_whole_is_one_thing() -> None:
    found = options(line("b s -> b s", call([(2, 4)], [(2, 4)])), grads=False)
    assert found["I"] == (("R",), ("R",)) and "R" not in found


def test_gradients_of_single_tensors() -> None:
    rule = line("b, b -> b", call([(2,), (2,)], [(2,)]))
    first = axis_options(rule, [True, False], [True])[0]
    assert first.ins == ("I", "R") and first.outs == ("I",)


def test_placements_of_one_factor_can_be_given() -> None:
    rule = line("b v -> b", call([(2, 4)], [(2,)]), out_as={"v": State.of("I")}, in_as={"b": State.of("R")})
    assert options(rule)["v"] == (("S1",), ("I",)) and options(rule)["b"] == (("R",), ("S0",))


def test_flops_are_shared_by_the_pieces() -> None:
    rule = line("m k, k n -> m n", call([(4, 6), (6, 8)], [(4, 8)]), flops=2.0)
    assert rule.flops_at({}) == 2 * 4 * 6 * 8 and rule.flops_at({"m": 2, "n": 4}) == 2 * 4 * 6 * 8 / 8


def test_arguments_are_found_by_place_and_by_name() -> None:
    c = Call("aten.x.default", (In(0), 3), {"dim": 1}, (), ())
    assert c.arg(1, "size") == 3 and c.arg(2, "dim") == 1 and c.arg(2, "keepdim", False) is False
    assert c.replaced(1, "size", 5) == ((In(0), 5), {"dim": 1})
    assert c.replaced(2, "dim", 0) == ((In(0), 3), {"dim": 0})


def test_the_call_of_a_node_numbers_its_tensors() -> None:
    node = Node("y", "op", "aten.cat.default", ([Ref(0), Ref(1, 2)], 0), {"other": Ref(0)})
    found = call_of(node, lambda ref: Spec((ref.node + 1,), "float32"))
    assert found.args == ([In(0), In(1)], 0) and found.kwargs == {"other": In(2)}
    assert [s.shape for s in found.ins] == [(1,), (2,), (1,)]


def test_axes_of_one_factor_multiply_and_axes_of_size_one_cut_nothing() -> None:
    rule = line("b s -> b s", call([(8, 4)], [(8, 4)]))
    by_name = {o.name: o for o in axis_options(rule, [True], [True])}
    mesh = Mesh.of(node=2, data=4, tensor=1)
    assert cuts_of(rule, [by_name[n] for n in "bbs"], mesh) == ({"b": 8}, {"b": ("node", "data")})


def test_a_local_call_has_the_local_shape() -> None:
    c = call([(4, 32)], [(4, 4, 8)], In(0), [4, 4, 8], target="aten.reshape.default")
    rule = line("b (h d) -> b h d", c, shape_arg=(1, "shape"))
    by_name = {o.name: o for o in axis_options(rule, [True], [True])}
    mesh = Mesh.of(data=2, tensor=4)
    assert local_call(c, rule, [by_name["b"], by_name["h"]], mesh).args == (In(0), [2, 1, 8])
    assert local_call(c, rule, [by_name["I"], by_name["R"]], mesh).args == c.args
