"""As much of PyTorch as the peers call, on numpy, so that their plumbing and formulas run where there is no PyTorch."""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
from scipy.special import erf


class Tensor(np.ndarray):
    requires_grad = False
    device = "cpu"

    def float(self):
        return self.astype(np.float32)

    def to(self, dtype):
        return self.astype(dtype)

    def long(self):
        return self.astype(np.int64)

    def clone(self):
        return self.copy()

    def detach(self):
        return self

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def requires_grad_(self):
        self.requires_grad = True
        return self

    def masked_fill(self, mask, value):
        return np.where(mask, np.float32(value), self).view(Tensor)

    def square(self):
        return np.square(self)

    def tril(self):
        return np.tril(self).view(Tensor)

    def chunk(self, count, axis):
        return tuple(np.split(self, count, axis))

    def unflatten(self, axis, sizes):
        assert axis == -1
        return self.reshape(*self.shape[:-1], *sizes)

    def unbind(self, axis):
        return tuple(tensor(each) for each in np.moveaxis(np.asarray(self), axis, 0))

    def flatten(self, start):
        return self.reshape(*self.shape[:start], -1)

    def transpose(self, first, second):
        return np.swapaxes(self, first, second)

    def copy_(self, other):
        self[...] = other

    def add_(self, other):
        self[...] += other

    def index_copy_(self, axis, index, source):
        assert axis == 2
        self[:, :, index] = source

    def backward(self):
        pass


def tensor(array) -> Tensor:
    return np.asarray(array).view(Tensor)


def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def softmax(x, axis):
    weight = np.exp(x - x.max(axis=axis, keepdims=True))
    return weight / weight.sum(axis=axis, keepdims=True)


def layer_norm(x, shape, scale, bias, epsilon):
    assert shape == x.shape[-1:]
    centered = x - x.mean(-1, keepdims=True)
    y = centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + epsilon)
    return (y if scale is None else y * scale) + (0 if bias is None else bias)


def rms_norm(x, shape, scale, epsilon):
    assert shape == x.shape[-1:]
    y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon)
    return y if scale is None else y * scale


def dropout(x, rate):
    """Drops the first of the values, so that a formula without it is told from one with it."""
    return np.where(np.arange(x.size).reshape(x.shape) < rate * x.size, 0, x / (1 - rate)).view(Tensor)


def cross_entropy(rows, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    log_weight = np.log(softmax(rows, -1))
    losses = -(1 - label_smoothing) * log_weight[np.arange(len(rows)), np.clip(targets, 0, rows.shape[1] - 1)]
    losses = np.where(targets == ignore_index, 0, losses - label_smoothing * log_weight.mean(-1)).view(Tensor)
    if reduction == "none":
        return losses
    return tensor(losses.sum() / (max(1, (targets != ignore_index).sum()) if reduction == "mean" else 1))


def linear(x, weight, bias=None):
    return x @ weight.T if bias is None else x @ weight.T + bias


def scaled_dot_product_attention(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False):
    """Of (batch, heads, length, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    key, value = (np.repeat(each, groups, axis=1) for each in (key, value))
    scores = query @ np.swapaxes(key, 2, 3) / np.sqrt(query.shape[-1])
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if attn_mask is not None:
        scores = np.where(attn_mask, scores, -np.inf)
    return tensor(softmax(scores, -1) @ value)


def grad(outputs, leaves, cotangents, retain_graph=False):
    assert [o.shape for o in outputs] == [c.shape for c in cotangents]
    assert all(leaf.requires_grad for leaf in leaves)
    return tuple(tensor(np.full(leaf.shape, 2, leaf.dtype)) for leaf in leaves)


class Optimizer:
    def __init__(self, leaves, **rates):
        assert all(leaf.requires_grad for leaf in leaves)

    def step(self):
        pass

    def zero_grad(self, set_to_none):
        pass


def install(monkeypatch) -> types.ModuleType:
    """Puts the imitation in place of `torch`, and forgets peers loaded with another."""
    torch, functional = types.ModuleType("torch"), types.ModuleType("torch.nn.functional")
    torch.Tensor, torch.bool, torch.float32 = Tensor, np.dtype(bool), np.float32
    torch.from_dlpack = lambda array: np.from_dlpack(array).view(Tensor)
    torch.no_grad = contextlib.nullcontext
    torch.softmax = softmax
    torch.rsqrt = lambda x: 1 / np.sqrt(x)
    torch.var_mean = lambda x, axis, correction: (x.var(axis=axis, ddof=correction), x.mean(axis=axis))
    torch.ones = lambda *shape, dtype, device: tensor(np.ones(shape, dtype))
    torch.zeros_like = np.zeros_like
    torch.arange = lambda n, device, dtype=np.float32: tensor(np.arange(n, dtype=dtype))
    torch.cos, torch.sin, torch.stack, torch.cat = np.cos, np.sin, np.stack, np.concatenate
    torch.stack = lambda arrays, axis: np.stack(arrays, axis).view(Tensor)
    torch.cat = lambda arrays, axis: np.concatenate(arrays, axis).view(Tensor)
    torch.compile = lambda function, dynamic, fullgraph, mode="default": function
    torch.autograd = types.SimpleNamespace(grad=grad)
    torch.cuda = types.SimpleNamespace(
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: 7,
    )
    torch.int64, torch.argmax = np.dtype(np.int64), np.argmax
    torch.optim = types.SimpleNamespace(AdamW=Optimizer)
    functional.rms_norm, functional.layer_norm, functional.gelu = rms_norm, layer_norm, gelu
    functional.cross_entropy, functional.dropout = cross_entropy, dropout
    functional.linear, functional.scaled_dot_product_attention = linear, scaled_dot_product_attention
    functional.silu = lambda x: x / (1 + np.exp(-x))
    functional.relu = lambda x: np.maximum(x, 0)
    dynamo, config = types.ModuleType("torch._dynamo"), types.ModuleType("torch._functorch.config")
    functional.embedding = lambda tokens, table: table[tokens]
    checkpoint = types.ModuleType("torch.utils.checkpoint")
    checkpoint.checkpoint = lambda function, *arguments, use_reentrant: function(*arguments)
    dynamo.reset = dynamo.mark_static_address = lambda *_: None
    config.patch = lambda donated_buffer: contextlib.nullcontext()
    nn, functorch = types.ModuleType("torch.nn"), types.ModuleType("torch._functorch")
    nn.functional, functorch.config = functional, config
    torch.nn, torch._dynamo, torch._functorch = nn, dynamo, functorch
    for module in (torch, nn, functional, dynamo, functorch, config, checkpoint):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in [name for name in sys.modules if name.startswith("xlafuse.bench.peers.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(sys.modules["xlafuse.bench.peers"], name.rpartition(".")[2])
    return torch
