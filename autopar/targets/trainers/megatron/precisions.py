"""Megatron's options of number formats as a precision policy."""

from __future__ import annotations

from autopar.errors import AutoparError
from autopar.targets.trainers.megatron.options import MegatronOptions
from autopar.words.precision import Precision

FP8 = {"delayed": "fp8-delayed", "tensorwise": "fp8", "mxfp8": "mxfp8", "blockwise": "fp8"}
"""Products of ``--fp8-recipe`` (TransformerConfig.fp8_recipe, ``delayed`` by default)."""
SHORT = {"bf16": "bfloat16", "fp32": "float32", "float32": "float32", "bfloat16": "bfloat16"}


def precision_of(options: MegatronOptions) -> str:
    """Return the policy as ``--precision`` of the command line spells it.

    Raises:
        ConfigError: two formats exclude each other.
    """
    bf16, fp16 = options.has("--bf16"), options.has("--fp16")
    if bf16 and fp16:
        raise options.error("--fp16", "stands beside --bf16; give one of them")
    params = "bfloat16" if bf16 else "float16" if fp16 else "float32"
    narrow_sum = options.has("--grad-reduce-in-bf16") or options.text("--main-grads-dtype") == "bf16"
    wide_sum = options.has("--accumulate-allreduce-grads-in-fp32")
    reduce = "float32"
    if bf16 and narrow_sum:
        reduce = "bfloat16"
    elif fp16 and not wide_sum:  # validate_args sums in float32 by itself for bf16 alone
        reduce = "float16"
    moments = _moments(options)
    products = _products(options)
    if products and not (bf16 or fp16):
        raise options.error("--fp8-format", "asks for products in 8 or 4 bits without --bf16 or --fp16; add one")
    gathers = options.has("--fp8-param-gather") or options.has("--fp4-param-gather")
    try:
        policy = Precision(params=params, reduce=reduce, moments=moments, products=products,
                           narrow_gathers=gathers and bool(products))  # fmt: skip
    except AutoparError as error:
        raise options.error("--bf16" if bf16 else "--fp16", str(error)) from None
    return policy.text


def _moments(options: MegatronOptions) -> str:
    kinds = {options.text(name) or "fp32" for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    masters = options.text("--main-params-dtype") or "fp32"
    options.has("--use-precision-aware-optimizer")
    if masters != "fp32":
        options.unpriced.append(f"--main-params-dtype: masters are stored in {masters}; the price has them in fp32")
    if len(kinds) > 1 or not kinds <= SHORT.keys():
        options.unpriced.append(f"--exp-avg-dtype: moments in {', '.join(sorted(kinds))} are priced in fp32")
        return "float32"
    return SHORT[kinds.pop()]


def _products(options: MegatronOptions) -> str:
    """Return the format of products in eight or four bits; empty for none."""
    wanted, recipe = options.text("--fp8-format"), options.text("--fp8-recipe", "delayed")
    narrower, kind = options.text("--fp4-format"), options.text("--fp4-recipe", "nvfp4")
    if narrower and wanted:
        raise options.error("--fp4-format", "stands beside --fp8-format; give one of them")
    if narrower:
        if kind != "nvfp4":
            options.unpriced.append(f"--fp4-recipe: {kind} is priced as nvfp4")
        return "nvfp4"
    if not wanted:
        return ""
    if recipe not in FP8 or recipe == "blockwise":
        options.unpriced.append(f"--fp8-recipe: {recipe} is priced as tensorwise, with one scale a tensor")
    return FP8.get(recipe, "fp8")
