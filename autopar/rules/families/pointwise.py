"""Pointwise operators: one rule, with broadcasting, for all of them.

The factors are the output's dims, named ``b s t u ...``; an input dim of size 1 that is broadcast lacks the factor.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.rules.families.shape import except_dim, named
from autopar.rules.notation import ADD, Rule, line
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import Sample, T, prove_with, rule, sample
from autopar.rules.terms import BATCH_NAMES, Term

NOTHING = """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Scalar div.Scalar neg.default to.dtype
    detach.default eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
    ge.Tensor ge.Scalar logical_not.default logical_and.default logical_or.default logical_xor.default
    bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
    bitwise_not.default __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar
    sign.default floor.default ceil.default round.default trunc.default isnan.default isinf.default isfinite.default
    floor_divide.default floor_divide.Scalar remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar sgn.default
    div.Tensor_mode div.Scalar_mode bitwise_left_shift.Tensor bitwise_right_shift.Tensor frac.default
    subtract.Tensor subtract.Scalar multiply.Scalar divide.Scalar true_divide.Scalar negative.default
    greater.Tensor greater.Scalar greater_equal.Tensor greater_equal.Scalar less.Tensor less.Scalar
    less_equal.Tensor less_equal.Scalar not_equal.Tensor not_equal.Scalar
    signbit.default isneginf.default isposinf.default heaviside.default
"""
INPUTS = """
    mul.Tensor div.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar gelu.default silu.default mish.default
    softplus.default log.default log2.default log10.default log1p.default abs.default sin.default cos.default
    erf.default clamp.default clamp_min.default clamp_max.default clamp.Tensor hardtanh.default hardswish.default
    hardsigmoid.default leaky_relu.default elu.default selu.default celu.default
    minimum.default maximum.default min.other max.other
    where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor lerp.Scalar
    lerp.Tensor addcmul.default addcdiv.default threshold.default logit.default atan2.default atan.default
    nan_to_num.default square.default xlogy.Tensor log_sigmoid.default relu6.default sinh.default cosh.default
    asin.default acos.default tan.default logaddexp.default logaddexp2.default lgamma.default digamma.default
    erfc.default erfinv.default asinh.default acosh.default atanh.default sinc.default hypot.default
    softshrink.default hardshrink.default multiply.Tensor divide.Tensor true_divide.Tensor absolute.default
    clip.default clamp_min.Tensor clamp_max.Tensor fmin.default fmax.default copysign.Tensor
    special_expit.default float_power.Tensor_Scalar
"""
OUTPUT = """
    relu.default exp.default exp2.default expm1.default tanh.default sigmoid.default sqrt.default rsqrt.default
    reciprocal.default
"""
LINEAR: dict[str, tuple[frozenset[int], ...]] = {
    "add.Tensor": (frozenset({0, 1}),),
    "sub.Tensor": (frozenset({0, 1}),),
    "rsub.Tensor": (frozenset({0, 1}),),
    "mul.Tensor": (frozenset({0}), frozenset({1})),
    "mul.Scalar": (frozenset({0}),),
    "div.Tensor": (frozenset({0}),),
    "div.Scalar": (frozenset({0}),),
    "neg.default": (frozenset({0}),),
    "where.self": (frozenset({1, 2}),),
    "lerp.Scalar": (frozenset({0, 1}),),
    "lerp.Tensor": (frozenset({0, 1}),),
    "addcmul.default": (frozenset({0, 1}), frozenset({0, 2})),
    "addcdiv.default": (frozenset({0, 1}),),
}
"""Inputs in which an operator is jointly linear. An added scalar is not linear: every rank would add it."""
LINEAR.update(
    {
        f"{alias}.{overload}": LINEAR[f"{name}.{overload}"]
        for alias, name in (("multiply", "mul"), ("divide", "div"), ("true_divide", "div"))
        for overload in ("Tensor", "Scalar")
    }
)
LINEAR.update({"subtract.Tensor": LINEAR["sub.Tensor"], "negative.default": LINEAR["neg.default"]})
FILLS = {"where.ScalarOther": 2, "where.ScalarSelf": 1, "masked_fill.Scalar": 2}
"""Operators that put a scalar, argument number so-and-so, in some places: linear if it is zero."""

_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def elementwise(call: Call) -> tuple[dict[str, int], tuple[Term, ...], Term]:
    """Return the sizes and terms of a broadcasting operator."""
    shape = call.out.shape
    n = len(shape)
    names = BATCH_NAMES[:n]

    def term(in_shape: tuple[int, ...]) -> Term:
        return tuple((names[n - len(in_shape) + i],) if size > 1 else () for i, size in enumerate(in_shape))

    sizes = {name: size for name, size in zip(names, shape, strict=True) if size != 1}
    return sizes, tuple(term(s.shape) for s in call.ins), term(shape)


def _names(text: str) -> Iterable[str]:
    return (f"aten.{name}" for name in text.split())


def pointwise(call: Call) -> Rule:
    """Make the rule of a pointwise operator."""
    sizes, inputs, output = elementwise(call)
    name = call.target.removeprefix("aten.")
    linear = tuple(g for g in LINEAR.get(name, ()) if all(p < len(inputs) for p in g))
    if name == "to.dtype" and _widens(call):
        linear = (frozenset({0}),)
    if name in FILLS and not call.args[FILLS[name]]:
        linear = (frozenset(i for i, spec in enumerate(call.ins) if spec.is_float),)
    if name in _PRODUCTS and len(inputs) == 1:
        linear, saves = ((frozenset({0}),) if name.startswith("mul") or call.args[0] == In(0) else ()), ()
    elif name in _SAVES_INPUTS:
        saves = tuple(range(len(inputs)))
    else:
        saves = ()
    if name in ("add.Tensor", "sub.Tensor", "subtract.Tensor") and len(inputs) == 1:
        linear = ()
    if name.startswith(("where", "masked_fill")):
        saves = tuple(i for i, s in enumerate(call.ins) if s.dtype == "bool")
    if not call.out.is_float:
        linear = ()
    return Rule(
        sizes, inputs, (output,), linear=linear, saves=saves, saves_out=name in _SAVES_OUTPUT,
        whole=frozenset(n for n, size in sizes.items() if size == 0), curve=_curve(call, name),
    )  # fmt: skip


def _curve(call: Call, name: str) -> str:
    """Return the name under which the cost model prices a pointwise operator."""
    if name == "to.dtype":
        before, after = call.ins[0].item_bytes, call.out.item_bytes
        return "widen" if after > before else "narrow" if after < before else ""
    n = call.out.n_elements
    if any(1 < spec.n_elements < n for spec in call.ins):
        return "broadcast"
    return ADD if name in _ADDITIONS and all(spec.dtype == call.out.dtype for spec in call.ins) else ""


_ADDITIONS = frozenset({"add.Tensor", "add.Scalar", "sub.Scalar", "subtract.Scalar"})


def _widens(call: Call) -> bool:
    src, dst = call.ins[0].dtype, call.out.dtype
    return src in _WIDTH and dst in _WIDTH and _WIDTH[dst] >= _WIDTH[src]


_PRODUCTS = frozenset({"mul.Tensor", "div.Tensor", "multiply.Tensor", "divide.Tensor", "true_divide.Tensor"})
_SAVES_INPUTS = frozenset(INPUTS.split())
_SAVES_OUTPUT = frozenset(OUTPUT.split())
for _target in (*_names(NOTHING), *_names(INPUTS), *_names(OUTPUT)):
    rule(_target)(pointwise)


@rule("aten.bucketize.Tensor", samples=[sample(T((4, 6), grad=False), T((3,), grad=False))])
def bucketize(call: Call) -> Rule:
    return line("..., n -> ...", call, whole="n")


@rule("aten.glu.default", samples=[sample(T((4, 6, 8))), sample(T((4, 6)), 0)])
def glu(call: Call) -> Rule:
    """Make the rule of ``glu``, which needs both halves of the dim: replicated. Better split fused projections."""
    return except_dim(call, call.arg(1, "dim", -1) % len(call.out.shape), "pointwise", linear=False, saves=(0,))


@rule("aten.prelu.default", samples=[sample(T((4, 6, 8)), T((6,))), sample(T((4, 6)), T((1,)))])
def prelu(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    weight = (dims[1],) if call.ins[1].shape[0] > 1 else ((),)
    return Rule(sizes, (tuple(dims), weight), (tuple(dims),), saves=(0, 1))


_A, _B = T((4, 6, 8)), T((6, 1))
_I = T((4, 8), "int64", 5)
_M = T((4, 1, 8), "bool", 2)


def _register() -> None:
    def prove(names: str, *samples: Sample) -> None:
        for target in _names(names):
            prove_with(target, *samples)

    two = (sample(_A, T((4, 6, 8))), sample(_A, _B), sample(T((8,)), _A), sample(T((4, 1, 8)), T((1, 6, 8))))
    prove("subtract.Tensor multiply.Tensor fmin.default fmax.default hypot.default copysign.Tensor", *two[1:3])
    prove("logaddexp2.default", *two[:2])
    prove("add.Tensor sub.Tensor rsub.Tensor mul.Tensor minimum.default maximum.default min.other max.other", *two)
    prove("atan2.default logaddexp.default", *two[:2])
    prove("div.Tensor", sample(_A, T((6, 1), low=0.5)), sample(_A, 3.0))
    prove("add.Tensor mul.Tensor sub.Tensor", sample(_A, 2.5), sample(_A, 3))
    prove("divide.Tensor true_divide.Tensor", sample(_A, T((6, 1), low=0.5)), sample(_A, 2))
    prove("add.Tensor", sample(_A, _B, alpha=0.5), sample(T((1, 1)), T((1,))), sample(T(()), _A))
    prove("mul.Tensor", sample(_A, T((6, 1), "bool", 2)), sample(_A, T((4, 6, 8), "float32")), sample(T(()), T((4,))))
    prove("subtract.Tensor multiply.Tensor", sample(_A, 2.5))
    prove("subtract.Scalar multiply.Scalar divide.Scalar true_divide.Scalar", sample(_A, 2.0))
    prove("add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar", sample(_A, 2.0))
    prove("remainder.Scalar fmod.Scalar floor_divide.Scalar", sample(_I, 3))
    prove("remainder.Tensor fmod.Tensor floor_divide.default", sample(_I, T((8,), "int64", 5, low=1)))
    prove("div.Tensor_mode", sample(_I, T((8,), "int64", 5, low=1), rounding_mode="floor"))
    prove("div.Scalar_mode", sample(_I, 3, rounding_mode="floor"))
    prove(
        """neg.default gelu.default silu.default mish.default softplus.default abs.default sin.default cos.default
        erf.default hardtanh.default hardswish.default hardsigmoid.default leaky_relu.default elu.default selu.default
        celu.default relu.default exp.default exp2.default expm1.default tanh.default sigmoid.default sinh.default
        cosh.default atan.default square.default log_sigmoid.default relu6.default detach.default sign.default
        sgn.default nan_to_num.default floor.default ceil.default round.default trunc.default isnan.default
        isinf.default isfinite.default lgamma.default digamma.default erfc.default asinh.default sinc.default
        softshrink.default hardshrink.default absolute.default negative.default frac.default signbit.default
        isneginf.default isposinf.default special_expit.default""",
        sample(_A),
        sample(T((4, 1))),
    )
    prove("acosh.default", sample(T((4, 8), low=1.5)))
    prove("heaviside.default", sample(T((4, 8), grad=False), T((8,), grad=False)))
    prove("float_power.Tensor_Scalar", sample(_A, 2))
    prove("asin.default acos.default tan.default atanh.default erfinv.default", sample(T((4, 8), low=-0.5, high=0.5)))
    prove(
        "sqrt.default rsqrt.default log.default log2.default log10.default log1p.default reciprocal.default",
        sample(T((4, 8), low=0.5)),
    )
    prove("logit.default", sample(T((4, 8), low=0.2, high=0.8)))
    prove("gelu.default", sample(_A, approximate="tanh"))
    prove(
        "to.dtype",
        sample(_A, "float32"),
        sample(T((4, 8), "float32"), "float64"),
        sample(_I, "float64"),
        sample(_A, "int64"),
    )
    prove("pow.Tensor_Scalar", sample(_A, 2), sample(_A, 3))
    prove("pow.Tensor_Tensor xlogy.Tensor", sample(T((4, 8), low=0.5), T((8,), low=0.5)))
    prove("pow.Scalar", sample(2.0, _A))
    prove("clamp.default clip.default", sample(_A, -0.5, 0.5), sample(_A, None, 0.5))
    prove("clamp_min.Tensor clamp_max.Tensor", sample(_A, T((8,), grad=False)))
    prove("clamp_min.default clamp_max.default", sample(_A, 0.1))
    prove("clamp.Tensor", sample(_A, T((8,), grad=False), T((1,), grad=False)))
    prove("threshold.default", sample(_A, 0.1, 0.0))
    prove(
        """greater.Tensor greater_equal.Tensor less.Tensor less_equal.Tensor
        not_equal.Tensor""",
        sample(_I, T((4, 1), "int64", 5)),
    )
    prove(
        """greater.Scalar greater_equal.Scalar less.Scalar less_equal.Scalar
        not_equal.Scalar""",
        sample(_I, 2),
    )
    prove("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", sample(_I, T((8,), "int64", 5)))
    prove("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", sample(_I, 2))
    prove("logical_not.default bitwise_not.default", sample(_M))
    prove(
        """logical_and.default logical_or.default logical_xor.default bitwise_and.Tensor bitwise_or.Tensor
        bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor""",
        sample(_M, T((6, 1), "bool", 2)),
    )
    prove(
        """bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar
        __xor__.Scalar""",
        sample(_I, 3),
    )
    prove("bitwise_left_shift.Tensor bitwise_right_shift.Tensor", sample(_I, T((8,), "int64", 3)))
    prove("where.self", sample(_M, _A, T((6, 1))), sample(T((4, 6, 8), "bool", 2), T((8,)), T(())))
    prove("where.ScalarOther", sample(_M, _A, 0.0), sample(_M, _A, 1.5))
    prove("where.ScalarSelf", sample(_M, 0.0, _A), sample(_M, 1.5, _A))
    prove("where.Scalar", sample(_M, 1.0, 0.0))
    prove("masked_fill.Scalar", sample(_A, _M, -1.0), sample(_A, _M, 0), sample(T((6, 8)), T((6, 1), "bool", 2), 0.0))
    prove("masked_fill.Tensor", sample(_A, _M, T((), grad=False)))
    prove("lerp.Scalar", sample(_A, T((4, 6, 8)), 0.3))
    prove("lerp.Tensor", sample(_A, T((4, 6, 8)), T((8,))))
    prove("addcmul.default", sample(_A, T((6, 1)), T((8,)), value=0.5))
    prove("addcdiv.default", sample(_A, T((6, 1)), T((8,), low=0.5), value=0.5))


_register()
