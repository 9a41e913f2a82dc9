"""What one rank does in ``test_long_context``: attention in pieces beside the whole, on real ranks."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention as attention

from autopar.rules.attention import attention_pairs
from autopar.rules.attention.attention import attention_with_dropout
from autopar.rules.attention.ring_attention import attention_across


def masks(length: int) -> dict[str, dict[str, Any]]:
    """The arguments beside queries, keys and values, by what they are."""
    places = torch.arange(length)
    back = places.unsqueeze(1) - places
    return {
        "all": {},
        "causal": {"is_causal": True},
        "causal, shared keys": {"is_causal": True, "enable_gqa": True},
        "window": {"attn_mask": (back >= 0) & (back < length // 3)},
        "padding": {"attn_mask": (places < length - 5)[None, None, None], "enable_gqa": True},
        "added": {"attn_mask": torch.randn(1, 4, length, length, dtype=torch.float64)},
        "dropout": {"dropout_p": 0.2},
        "dropout, causal, shared keys": {"dropout_p": 0.2, "is_causal": True, "enable_gqa": True},
        "dropout, window": {"dropout_p": 0.2, "attn_mask": (back >= 0) & (back < length // 3)},
    }


def compare(length: int) -> dict[str, float]:
    """The worst difference of results and gradients on this rank, by way and mask."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("seq",))
    torch.manual_seed(1)
    attention_pairs.MOST_SCORES = 40  # of dropout, several blocks
    result = {}
    for what, more in masks(length).items():
        shared = 2 if more.get("enable_gqa") else 4
        whole = [torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, shared, shared)]
        grad = torch.randn_like(whole[0])
        leaves = [x.clone().requires_grad_() for x in whole]
        drawn = {"seed": torch.tensor(5), "site": 3, "shape": whole[0].shape} if "dropout_p" in more else {}
        if drawn:
            out = attention_with_dropout(*leaves, **more, **drawn, cut={}, shards=((), (), (), ()))
        else:
            out = attention(*leaves, **more)
        out.backward(grad)
        mine = slice(rank * length // size, (rank + 1) * length // size)
        mask = more.get("attn_mask")
        cut = {} if mask is None or mask.shape[-2] == 1 else {"attn_mask": mask[..., mine, :]}
        for way in ("q", "ring") if more.get("is_causal") else ("ring",):
            places = mine if way == "ring" else slice(None)
            pieces = [x[:, :, at].clone().requires_grad_() for x, at in zip(whole, (mine, places, places), strict=True)]
            shards = {"shards": ((), (), ("seq",), ())} if drawn else {}
            with spmd.set_current_mesh(mesh):
                made = attention_across(*pieces, **{**more, **cut}, **drawn, **shards, cut={way: ("seq",)})
            made.backward(grad[:, :, mine])  # as in training, where no mesh is the ambient one by then
            for x in pieces[1:] if way == "q" else ():
                dist.all_reduce(x.grad)
            pairs = [(made, out[:, :, mine]), (pieces[0].grad, leaves[0].grad[:, :, mine])]
            pairs += [(x.grad, y.grad[:, :, places]) for x, y in zip(pieces[1:], leaves[1:], strict=True)]
            result[f"{way}, {what}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return result
