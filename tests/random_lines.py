# SPDX-License-Identifier: Apache-2.0
"""The lines of random programs: templates by kind, and calls of torch's own list of ops.

Places in a template: {f}, {g}, {e}, {h}: values; {s}: one whose last dims are alike; {m}: a mask;
{i}: ints from 0 to 3, of the rows; {j}: ints; {n}: a number that was read; {B}: the rows, written
out; {d}: a dim; {q}: a scale; {name}: what the line makes; {P}, {Q}, {R}: values, {J}, {K}: ints,
in memory of their own.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

KINDS: dict[str, list[str]] = {
    "make": [
        "{f}.new_zeros({f}.shape)",
        "{f}.new_ones({f}.shape)",
        "{f}.new_full({f}.shape, {q})",
        "{f}.new_zeros({f}.shape[0], 3)",
        "{f}.new_full(({f}.size(0), 4), {q})",
        "{f}.new_zeros({B}, 4)",
        "{f}.new_ones(4)",
        "torch.zeros_like({f})",
        "torch.ones_like({f})",
        "torch.full_like({f}, {q})",
        "torch.empty_like({f}).fill_({q})",
        "torch.zeros({B}, 4, dtype=D)",
        "torch.ones({f}.shape, dtype=D)",
        "torch.full((len({f}), 4), {q}, dtype=D)",
        "torch.arange({f}.shape[0], dtype=D)",
        "torch.arange({B}, dtype=D)[:, None]",
        "torch.linspace(0, 1, {f}.shape[0], dtype=D)",
        "torch.eye(4, dtype=D)",
        "torch.eye({f}.shape[0], dtype=D)",
        "F.one_hot({i}, 4).to(D)",
        "torch.nn.functional.one_hot({i}).to(D)",
        "torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=D)",
        "{f}.clone()",
        "torch.empty_like({f}).copy_({g})",
        "{f}.new_tensor([1.0, 2.0, 3.0, 4.0])",
        "torch.zeros({f}.shape[0] * 2, 4, dtype=D)",
        "torch.ones(2, {f}.shape[0], dtype=D)",
        "torch.zeros(({B}, 1), dtype=D)",
        "torch.full((), {q}, dtype=D)",
        "torch.zeros((), dtype=D)",
        "torch.empty(0, dtype=D)",
        "torch.zeros({f}.shape[-1], {f}.shape[0], dtype=D)",
        "{f}.new_empty({f}.shape).fill_({q})",
        "{f}.new_empty(({f}.shape[0], 2)).zero_()",
        "{f}.new_full((), {q})",
        "torch.eye({f}.shape[0], 4, dtype=D)",
        "torch.eye({B}, dtype=D)",
        "torch.arange({f}.numel(), dtype=D).view({f}.shape)",
        "torch.arange(1, 1 + {f}.shape[0], dtype=D).unsqueeze(-1)",
        "torch.arange(0, 2, 0.5, dtype=D)",
        "torch.logspace(-1, 0, {f}.shape[0], dtype=D)",
        "torch.linspace(-1, 1, {B}, dtype=D)",
        "torch.zeros_like({f}, memory_format=torch.contiguous_format)",
        "torch.zeros_like({f}.T)",
        "torch.zeros_like({f}[:1])",
        "torch.full_like({f}[:, 0], {q})",
        "torch.tensor({f}.shape, dtype=D)",
        "torch.as_tensor([[1.0], [2.0]], dtype=D)",
        "torch.scalar_tensor({q}, dtype=D)",
        "torch.ones({f}.shape, dtype=D).tril()",
        "torch.zeros({f}.shape, dtype=D, requires_grad=True)",
        "torch.nn.Parameter(torch.ones(4, dtype=D))",
        "torch.zeros({B}, dtype=torch.long)",
        "torch.zeros_like({j})",
        "torch.empty(0, dtype=torch.long)",
        "{j}.new_zeros({j}.shape)",
        "{j}.new_full(({f}.shape[0],), 1)",
        "torch.arange({f}.shape[0])",
        "torch.arange({f}.shape[0]) % 4",
        "{j}.clone()",
        "({f} * 2).long().clamp(0, 3)",
        "{f}.argmax(-1)",
        "torch.tensor([0, 2, 1, 3])",
        "F.one_hot({i}, 4)",
        "lazy(torch.ones({B}, 4, dtype=D))",
        "lazy(torch.full((4, {B}), {q}, dtype=D), batch=1)",
        "lazy(torch.ones(3, 4, dtype=D), batch=None)",
        "torch.zeros({f}.shape, dtype=torch.float32)",
    ],
    "compute": [
        "{f} + {g}",
        "{f} * {g}",
        "{f} - {q} * {g}",
        "{f} @ w",
        "{f} * v",
        "torch.tanh({f} @ w) + v",
        "{f}.tanh()",
        "({f} * {q}).sin()",
        "{f}.sigmoid() * 2",
        "{f} * {q} + 1",
        "F.relu({f})",
        "F.softplus({f})",
        "{f}.mean({d})",
        "{f}.sum({d}, keepdim=True)",
        "{f} * {f}.mean()",
        "{f} - {f}.mean(0)",
        "{f}.softmax(-1)",
        "{f}.cumsum({d}) / 3",
        "{f}.amax(-1, keepdim=True)",
        "{f}.var({d}, correction=0)",
        "torch.where({m}, {f}, {g})",
        "torch.where({f} > 0, {f}, {q})",
        "{f}.masked_fill({m}, {q})",
        "torch.cat([{f}, {g}], {d})",
        "torch.stack([{f}, {g}], {d})",
        "{f} * {n}",
        "{f}.contiguous() * 2",
        "{f}.repeat(2, 1) * {q}",
        "{f}.flip({d})",
        "{f}.gather(1, {i}[:, None])",
        "{f}[{i}]",
        "{f}[{i}] * {g}",
        "{f}[{j}]",
        "{f}.index_select(0, {i})",
        "{f}.gather(0, {i}[:, None].expand(-1, {f}.shape[-1]))",
        "torch.take_along_dim({f}, {i}[:, None], 0)",
        "F.embedding({i}, {f})",
        "{f}[({f}[:, 0] > 0).nonzero().squeeze(-1)].sum() + {g}",
        "F.layer_norm({f}, {f}.shape[-1:])",
        "{f}[{m}].sum() + {g}",
        "v[{i}]",
        "F.embedding({i}, w)",
        "{f}.index_select({d}, torch.tensor([1, 0]))",
        "{f}.pow(2).sum() * {g} / 9",
        "F.cross_entropy({f}, {i}, reduction='none')",
        "{f}.lerp({g}, 0.3)",
        "torch.addcmul({f}, {g}, {f}, value=0.5)",
        "{f}.outer({g})",
        "{f} @ {f}.T",
        "{f} @ {g}.mT",
        "torch.einsum('ij,kj->ik', {f}, {g})",
        "torch.bmm({f}[:, :, None], {g}[:, None])",
        "F.linear({f}, w, v)",
        "{f}[:, None] - {g}[None]",
        "torch.cdist({f}, {g})",
        "{f}.sum()",
        "{f}.mean()",
        "{f}.norm(dim={d})",
        "{f}.max({d})[0]",
        "{f}.sort({d}).values",
        "{f}.topk(2, {d})[0]",
        "{f}.double() * {q}",
        "({f}.float() * 2).double()",
        "{f} / ({g}.abs() + 1)",
        "{f}[{i}]",
        "{f}[{i}.argsort()]",
        "{f}.roll(1, {d})",
        "{f}.view(-1, 2).sum(-1)",
        "{f}.expand(2, *{f}.shape).sum(0)",
        "F.pad({f}, (1, 0))",
        "torch.cat([{f}, torch.zeros(2, 4, dtype=D)])",
        "torch.cat([{f}[:1], {g}[1:]])",
        "F.nll_loss({f}.log_softmax(-1), {i})",
        "F.cross_entropy({f}, {i})",
        "F.mse_loss({f}, {g})",
        "F.batch_norm({f}, None, None, training=True)",
        "{f}.unique()",
        "{f}[{f} > 0]",
        "{f}.nonzero().double()",
        "{f}.masked_select({m})",
        "{f}.std() * {g}",
        "{f}.logsumexp({d})",
        "{f}.prod({d})",
        "{f}.abs().sqrt()",
        "{f}.clamp(-0.5, 0.5)",
        "torch.broadcast_to({f}, (2, *{f}.shape)) * {q}",
        "{f}.bool().double()",
        "{j} * {f}",
        "{j}.double() * {q}",
        "torch.bincount({i}, minlength=4) * {f}.mean()",
        "{f}.scatter_add(1, {i}[:, None], {g})",
        "{f}.index_add(0, {i}, {g})",
        "torch.zeros(4, 4, dtype=D).index_add(0, {i}, {f})",
        "torch.func.functional_call(torch.nn.Identity(), {}, ({f},)) * 2",
        "torch.utils.checkpoint.checkpoint(lambda a: a.tanh() * {q}, {f}, use_reentrant=False)",
        "sum(a.sum() for a in {f})",
        "torch.stack([a * {q} for a in {f}])",
        "torch.stack(list({f}.unbind(-1)), -1)",
        "{f}.pow({n})",
        "-{f}",
        "1 - {f}",
        "{q} / (2 + {f}.abs())",
        "torch.rot90({f})",
        "torch.rot90({f}) * {q}",
        "torch.renorm({f}, 2, 0, 1.0)",
        "torch.linalg.matrix_exp({s}.tanh())",
        "torch.kron({f}, {f}[:1])",
        "F.conv1d({f}.T[None], {f}.T[None, :, :1]).mT",
        "torch.linalg.cholesky({f}.T @ {f} + torch.eye({f}.shape[-1], dtype=D)).tanh()",
    ],
    "mask": [
        "{f} > 0",
        "{f} < {g}",
        "{i} == 1",
        "({i} > 0)[:, None]",
        "({f} > 0).any(-1)",
        "({f} > 0.1).all(-1, keepdim=True)",
        "{m} & ({f} > -0.3)",
        "~{m}",
        "torch.ones_like({f}, dtype=torch.bool)",
        "torch.tril(torch.ones({f}.shape[0], {f}.shape[0], dtype=torch.bool))",
        "torch.arange({f}.shape[0]) < 3",
        "{f}.isfinite()",
        "{f} == {f}.amax(-1, keepdim=True)",
        "{j} > 1",
        "{m} | {f}.lt(0)",
        "torch.zeros({f}.shape, dtype=torch.bool)",
        "{m}.clone()",
        "{i}[:, None] == {i}[None]",
        "{i}[:, None] == torch.arange(4)",
        "torch.isin({i}, torch.tensor([0, 2]))",
    ],
    "view": [
        "{f}[:2]",
        "{f}[:, 1:]",
        "{f}[:, 0]",
        "{f}[..., -1]",
        "{f}[1]",
        "{f}.T",
        "{f}.transpose(0, 1)",
        "{f}.view(-1)",
        "{f}.view({f}.shape)",
        "{f}.view_as({g})",
        "{f}.reshape_as({g})",
        "{f}.reshape(-1, 2)",
        "{f}.flatten()",
        "{f}.unsqueeze({d})",
        "{f}.squeeze()",
        "{f}.detach()",
        "{f}.select({d}, 0)",
        "{f}.narrow({d}, 0, 2)",
        "{f}.chunk(2, {d})[1]",
        "{f}.unbind({d})[0]",
        "{f}.diagonal()",
        "{f}.expand_as({g})",
        "{f}[None].expand(3, *{f}.shape)",
        "{f}[:, None]",
        "{f}.permute(1, 0)",
        "{f}.split(2, {d})[0]",
        "{f}.unfold(1, 2, 1)",
        "{f}.movedim(0, -1)",
        "{f}.contiguous()",
        "{f}.swapaxes(0, -1)",
        "{f}[::2]",
        "{f}[:, ::2]",
        "torch.atleast_2d({f})",
        "{f}.to(D)",
        "{f}[-1]",
        "{f}[..., None]",
        "{f}[None]",
        "{f}[1:]",
        "{f}[:-1]",
        "{f}[1:, 1:]",
        "{f}[:, 1:3]",
        "{f}[:, -1:]",
        "{f}.view({f}.shape[0], -1)",
        "{f}.view({B}, -1)",
        "{f}.view(2, -1)",
        "{f}.view({f}.shape[0], 2, 2)",
        "{f}.reshape({f}.shape[0], -1)",
        "{f}.unflatten(-1, (2, 2))",
        "torch.broadcast_tensors({f}, {g})[0]",
        "torch.broadcast_tensors({f}[..., :1], {f})[1]",
        "torch.broadcast_tensors({f}[:1], {g}, v)[1]",
        "{f}.T.contiguous()",
        "{f}.T.contiguous().T",
        "{f}.mT.ravel()",
        "{f}.mT.reshape(-1)",
        "{f}.ravel()",
        "torch.atleast_3d({f})",
        "torch.meshgrid({f}.flatten(), indexing='ij')[0]",
        "{f}.mT",
        "{f}.mH",
        "{f}.ravel()",
        "{f}.expand(-1, -1)",
        "{f}.broadcast_to(2, *{f}.shape)",
        "{f}.as_strided((2,), (1,))",
        "{f}.tensor_split(2, {d})[1]",
        "{f}.hsplit(2)[0]",
        "{f}.vsplit([1])[1]",
        "{f}.select(-1, 1)",
        "{f}.view(torch.int64).view(D)",
        "{f}.squeeze({d})",
        "{f}.squeeze(-1)",
        "{f}.diagonal(0, 0, 1)",
        "{f}.adjoint()",
        "{f}.real",
        "{f}.type(D)",
        "{f}.double()",
        "torch.real({f})",
        "{f}.view(-1)[1:]",
        "{f}.T.T",
        "{f}.detach().T",
        "torch.swapaxes({f}, 0, 1)",
        "torch.flatten({f}, -2)",
        "{f}.positive()",
        "{f}.index_select(0, {i})",
        "{j}.view(-1)",
        "{j}[:2]",
    ],
    "write": [
        "{f}[:, 1:] = {g}[:, :-1].clone()",
        "{f}[:, 0] = {q}",
        "{f}[0] = {q}",
        "{f}[:2] = {g}[:2].clone()",
        "{f}[1:] = {q}",
        "{f}[:, 1] = {g}[:, 0]",
        "{f}[..., 0] = {g}.mean()",
        "{f}[{m}] = {q}",
        "{f}[{m}] += 1",
        "{f}[{i} == 1] = {q}",
        "{f}[torch.arange({f}.shape[0]), {i}] = {q}",
        "{f}[torch.arange({f}.shape[0]), {i}] += {g}[..., 0]",
        "{f}[torch.tensor([0, 1])] = {q}",
        "{f}[:, torch.tensor([0, 2])] *= {q}",
        "{f}[:] = {g}",
        "{f}.add_({g})",
        "{f}.add_({g}, alpha={q})",
        "{f}.mul_({q})",
        "{f}.mul_({g})",
        "{f}.sub_({g}.mean())",
        "{f}.div_(2)",
        "{f}.copy_({g})",
        "{f}.copy_({g}.mean(0))",
        "{f}.fill_({q})",
        "{f}.zero_()",
        "{f}.masked_fill_({m}, {q})",
        "{f}.masked_fill_({f} > 0.5, 0.5)",
        "{f}.index_put_((torch.tensor([0, 1]),), {g}[:2].clone())",
        "{f}.index_put_(({i},), {g}, accumulate=True)",
        "{f}.scatter_(1, {i}[:, None], {q})",
        "{f}.scatter_(-1, {i}[:, None], {g})",
        "{f}.scatter_add_(1, {i}[:, None], {g})",
        "{f}.index_fill_({d}, torch.tensor([1]), {q})",
        "{f}.index_add_(0, torch.tensor([0, 1]), {g}[:2].clone())",
        "{f}.index_copy_(0, torch.tensor([1, 0]), {g}[:2].clone())",
        "{f}.masked_scatter_({m}, {g}.clone())",
        "{f}.relu_()",
        "{f}.tanh_()",
        "{f}.clamp_(min=-0.5)",
        "{f}.clamp_(max=0.7)",
        "{f}.sigmoid_()",
        "{f}.neg_()",
        "{f}.exp_()",
        "{f}.addcmul_({g}, {g})",
        "{f}.lerp_({g}, 0.3)",
        "{f}.detach().add_({q})",
        "{f}.detach()[0] += 1",
        "{f}.detach()[:, 0].mul_({q})",
        "{f}.view(-1).add_({q})",
        "{f}.view(-1)[:3].mul_({q})",
        "{f}[:, 1:].add_({g}[:, 1:])",
        "{f}.T.mul_({q})",
        "{f}.T[0] = {q}",
        "{f}.select({d}, 0).add_({g}.mean())",
        "{f}.fill_diagonal_({q})",
        "{f}.diagonal().add_(1)",
        "{f}.cumsum_(-1)",
        "{f}.unsqueeze_(-1)",
        "{f}.swapdims_(0, 1)",
        "{f}.t_()",
        "{f}.transpose_({d}, 0)",
        "{f}.squeeze_()",
        "{f}.unsqueeze_({d}).mul_({q})",
        "{f} += {g}",
        "{f} *= {q}",
        "{f} -= {g}.mean(0)",
        "F.relu({f}, inplace=True)",
        "F.leaky_relu_({f}, 0.2)",
        "{f}.where({m}, {g})",
        "{f}.data.mul_({q})",
        "{f}[range(2)] = {q}",
        "{f}[[0, 1]] = {q}",
        "{f}[[1, 0]] = {g}[:2].clone()",
        "{f}[(0, 1), (1, 0)] = {q}",
        "{f}[None, 0] = {q}",
        "{f}[..., None] = {q}",
        "{f}[True] = {q}",
        "{f}[-1] = {g}[0].clone()",
        "{f}[-1:] += {g}[-1:].clone()",
        "{f}[::2] = {q}",
        "{f}[:, ::2] += {g}[:, ::2].clone()",
        "{f}[1:, 1:] = {g}[:-1, :-1].clone()",
        "{f}[1:] += {g}[:-1].clone()",
        "{f}[{i}] = {q}",
        "{f}[{i}.argsort()] = {g}.clone()",
        "{f}[np.array([0, 1])] = {q}",
        "{f}[np.array([1, 0])] += {g}[:2]",
        "{f}[{m}] = {g}[{m}]",
        "{f}[{m}] = {f}[{m}] * 2",
        "{f}[{m}, 0] = {q}",
        "{f}[:, 0][{i} > 1] = {q}",
        "{f}[{f} > 0] = 0.5",
        "{f}[{f} > 0] *= {q}",
        "{f}[...] = {g}",
        "{f}[()] = {q}",
        "{f}[0][1] = {q}",
        "{f}[:, 0][:2] = {q}",
        "{f}[0, 0] = {g}.sum()",
        "{f}[0, 1] += {n}",
        "{f}[:, 2] = torch.arange({f}.shape[0], dtype=D)",
        "{f}[:, 1] = {i}",
        "{f}[torch.arange({B}), {i}] = {g}[:, 0]",
        "{f}[torch.arange({f}.shape[0])] += {g}",
        "for b in range({f}.shape[-1]): {f}[..., b] += {g}[..., 0] * b",
        "for b, r in enumerate({g}): {f}[b] = r * {q}",
        "for b in range(2): {f}[b].add_({g}[b])",
        "for r in {f}.unbind(-1): r.mul_({q})",
        "for r in {f}.split(1, -1): r.add_({g}.mean())",
        "torch._foreach_add_([{P}, {Q}], 1.0)",
        "torch._foreach_mul_([{P}, {Q}], [0.5, 2.0])",
        "{f}.put_(torch.tensor([0, 3]), torch.tensor([1.0, 2.0], dtype=D))",
        "{f}.index_reduce_(0, torch.tensor([1, 0]), {g}[:2].clone(), 'prod')",
        "{f}.scatter_reduce_(1, {i}[:, None], {g}, 'amax')",
        "{f}.scatter_(0, {i}[None], {q})",
        "{f}.resize_(1, 1)",
        "{f}.set_({g}.detach().clone())",
        "{f}.copy_({g}[:1])",
        "{f}[:1].copy_({g}[1:2])",
        "torch.Tensor.add_({f}, 1)",
        "{f}.__setitem__(0, {q})",
        "{f}.__iadd__({g})",
        "torch.nn.init.constant_({f}.detach(), {q})",
        "{f}.data.add_({g}.detach())",
        "{f}.data[0] = {q}",
        "{f}.detach_()",
        "if not {f}._is_view(): {f}.requires_grad_()",
        "{f}.unsqueeze(0).add_({g})",
        "{f}.permute(1, 0).copy_({g}.T)",
        "{f}.expand_as({f}).mul_({q})",
        "{f}.view({f}.shape[0], -1)[:, 0] = {q}",
        "{f}.view(2, -1)[0] = {q}",
        "{f}.reshape(-1)[0] = {q}",
        "{f}.flatten()[1:3] *= {q}",
        "{f}.narrow(0, 0, 1).zero_()",
        "{f}.index_add_(0, {i}, {g})",
        "{f}.index_copy_(1, torch.tensor([2, 0]), {g}[:, :2].clone())",
        "{f}.masked_fill_(~{m}, {g}.mean())",
        "{f}.clamp_({g}.min().item(), 1.0)",
        "{f}.cumsum_({d})",
        "{f}.squeeze_({d})",
        "{f}.t_().mul_({q})",
        "{f}.addmm_({g}, w, beta=0.5)",
        "{f}.addmv_({g}, v)",
        "{f}.addbmm_({g}[None], w[None])",
        "{f}.baddbmm_({g}[:, None], w.expand(len({g}), 4, 4))",
        "{f}.tril_()",
        "{f}.renorm_(2, 0, 1.0)",
        "{f}.round_()",
        "{f}.abs_()",
        "{f}.pow_(2)",
        "{f}.sqrt_()",
        "{f}.floor_divide_(2)",
        "{f}.remainder_(0.7)",
        "{f}.atan2_({g})",
        "{f}.copysign_({g})",
        "{f}.eq_({g})",
        "{f}.gt_(0)",
        "{j}.add_(1)",
        "{j}[:2] = 0",
        "{j}[{m}] = 1",
        "{j}.clamp_(max=2)",
        "{j}.copy_({i})",
        "{j} += {i}",
        "{m}.logical_not_()",
        "{m}[0] = True",
        "{m}[:, 0] = False",
        "{m} &= ({f} > 0)",
        "{f} /= 2",
        "{f} **= 2",
        "{f} @= w",
        "{f} = {f} * {q}",
        "{f} = {g}",
        "{f}, {g} = {g}, {f}",
        "{f} = {f} + {g}",
        "{h} = {f}; {h} *= {q}",
        "F.dropout({f}, 0.5, inplace=True)",
        "F.elu({f}, inplace=True)",
        "F.hardtanh_({f})",
        "F.threshold_({f}, 0.1, 0.2)",
        "F.silu({f}, inplace=True)",
        "{f}.normal_()",
        "{f}.uniform_(-1, 1)",
        "{f}[0].normal_()",
        "{f}[:, 0].uniform_()",
        "{f}.T.normal_()",
        "{f}.bernoulli_(0.5)",
        "{f}.random_(0, 3)",
        "{f}.exponential_()",
        "del {f}",
    ],
    "out": [
        "torch.add({f}, {g}, out={h})",
        "torch.mul({f}, {q}, out={h})",
        "torch.sub({f}, 1, out={h})",
        "torch.clamp({f}, max=0.0, out={h})",
        "torch.exp({f}, out={h})",
        "torch.tanh({f}, out={h}.detach())",
        "torch.matmul({f}, w, out={h})",
        "torch.mm({f}, w.detach(), out={h})",
        "torch.sum({f}, 0, out={h})",
        "torch.sum({f}, 1, keepdim=True, out={h})",
        "torch.mean({f}, {d}, out={h})",
        "torch.cat([{f}, {g}], out={h})",
        "torch.stack([{f}, {g}], out={h})",
        "F.normalize({f}, dim=-1, out={h})",
        "torch.cumsum({f}, {d}, out={h})",
        "torch.where({m}, {f}, {g}, out={h})",
        "torch.maximum({f}, {g}, out={h})",
        "torch.addcmul({f}, {g}, {g}, out={h})",
        "torch.abs({f}, out={h}[:, :2])",
        "torch.gather({f}, 1, {i}[:, None], out={h})",
        "torch.index_select({f}, {d}, torch.tensor([1, 0]), out={h})",
        "torch.amax({f}, -1, out={h})",
        "torch.logsumexp({f}, -1, out={h})",
        "torch.softmax({f}, -1, out={h})",
        "torch.take({f}, {i}, out={h})",
        "torch.arange({f}.shape[0], out={h})",
        "torch.full({f}.shape, {q}, out={h})",
        "torch.max({f}, {d}, out=({P}, {J}))",
        "torch.min({f}, {d}, keepdim=True, out=({P}, {J}))",
        "torch.sort({f}, {d}, out=({P}, {J}))",
        "torch.topk({f}, 2, {d}, out=({P}, {J}))",
        "torch.kthvalue({f}, 1, {d}, out=({P}, {J}))",
        "torch.mode({f}, {d}, out=({P}, {J}))",
        "torch.median({f}, {d}, out=({P}, {J}))",
        "torch.aminmax({f}, dim={d}, out=({P}, {Q}))",
        "torch.frexp({f}, out=({P}, {J}))",
        "torch.argmax({f}, {d}, out={j})",
        "torch.argsort({f}, {d}, out={J})",
        "torch.randn({f}.shape[0], 4, dtype=D, out={h})",
        "torch.rand({f}.shape, out={h})",
        "torch.eye({f}.shape[0], out={h})",
        "torch.zeros({B}, 4, out={h})",
        "torch.linspace(0, 1, {B}, out={h})",
        "torch.add({f}, {f}, out={f})",
        "torch.mul({f}, {f}.T, out={f})",
        "torch.sub({f}[:1], {g}, out={h})",
        "torch.add({f}, {g}, out={h}[:2])",
        "torch.add({f}, {g}, out={h}.T)",
        "torch.add({f}, {g}, out={h}.view({f}.shape))",
        "torch.gt({f}, {g}, out={m})",
        "torch.logical_not({m}, out={m})",
        "torch.add({j}, 1, out={h})",
        "torch.bmm({f}[:, :, None], {g}[:, None], out={h})",
        "torch.addmm({f}, {g}, w.detach(), out={P})",
        "torch.add({f}, {g}, out=torch.empty(0, dtype=D))",
    ],
    "read": [
        "{f}.mean().item()",
        "float({f}.sum() / 9)",
        "float(({f} > 0).sum()) / 5",
        "{f}.flatten()[0].tolist()",
        "1.0 if bool(({f} > 0).any()) else 0.5",
        "sum({f}.flatten()[:2].tolist())",
        "0.3 + len({f}) / 10",
        "2.0 if {m}.all() else 0.7",
        "float(F.mse_loss({f}, {g}))",
        "float({f}.detach().abs().max())",
        "0.5 if torch.isfinite({f}).all() else 0.1",
        "bool(torch.equal({f}, {g}))",
        "bool(torch.allclose({f}, {f}))",
        "{f}.detach().numpy().sum().item()",
        "float({f}.max())",
        "int({j}.sum())",
        "{f}.sum().item() / 9",
        "float({f}[0, 0])",
        "float(sum({f}.flatten()))",
        "[float(a.mean()) for a in {f}][0]",
        "str(tuple({f}.shape))",
        "bool({f}.requires_grad)",
        "{f}.is_contiguous()",
        "{f}.is_complex()",
        "{f}.storage_offset()",
        "str({f}.stride())",
        "f'{{f}.abs().mean():.3f}'",
        "str({f}.detach() > 0.3)",
        "copy.deepcopy({f}.detach()).sum().item()",
        "float(np.asarray({f}.detach()).mean())",
        "{f}.detach().min().item()",
        "{j}.max().item()",
        "len({f}.tolist())",
        "float(loss) if (loss := {f}.pow(2).mean()) > 0.5 else 0.25",
    ],
    "draw": [
        "F.dropout({f}, 0.5)",
        "F.dropout({f}.sin(), 0.3)",
        "torch.rand_like({f})",
        "{f} + torch.randn_like({f})",
        "torch.bernoulli({f}.sigmoid())",
        "F.dropout({f}.T, 0.5)",
        "F.dropout({f}.transpose(0, 1).contiguous(), 0.4)",
        "F.feature_dropout({f}, 0.5)",
        "torch.empty_like({f}).normal_()",
        "torch.empty_like({f}).uniform_(-1, 1)",
        "torch.rand(3, dtype=D)",
        "torch.randn({f}.shape, dtype=D)",
        "F.dropout(torch.stack([{f}, {g}], 0), 0.5)",
        "F.dropout(torch.cat([{f}, {g}]), 0.5)",
        "F.rrelu({f}, training=True)",
        "torch.normal({f}, 1.0)",
        "F.dropout({f}.repeat(3, 1), 0.5)",
        "torch.randint(0, 4, ({f}.shape[0],))",
        "torch.randperm({f}.shape[0]).double()",
        "torch.multinomial({f}.softmax(-1), 2)",
        "torch.multinomial({f}.softmax(-1), 1)[:, 0]",
        "torch.rand(()).item()",
        "torch.rand({B}, 1, dtype=D) * {f}",
        "F.dropout1d({f}[None], 0.5)",
        "F.alpha_dropout({f}, 0.3)",
        "F.gumbel_softmax({f})",
        "F.scaled_dot_product_attention({f}[:, None], {g}[:, None], {g}[:, None], dropout_p=0.4)",
        "torch.poisson({f}.abs())",
        "torch.normal(0.0, 1.0, {f}.shape, dtype=D)",
        "{f} + torch.randn({f}.shape[-1], dtype=D)",
        "torch.randn_like({f}[:, :1]) * {g}",
        "F.dropout({f}[:, :2], 0.5)",
        "F.dropout({f}, 0.5, training=False)",
        "torch.bernoulli({f}.sigmoid()) * {g}",
        "torch.dropout({f}, 0.2, True)",
    ],
    "grad": [
        "{f}.sum().backward(retain_graph=True)",
        "({f} * {g}).mean().backward(retain_graph=True)",
        "{f}.backward(torch.ones_like({f}), retain_graph=True)",
        "{name} = torch.autograd.grad({f}.sum(), w, retain_graph=True, allow_unused=True)[0]",
        "{name} = torch.autograd.grad({f}.mean(), [w, v], retain_graph=True, allow_unused=True)[1]",
        "{name} = torch.autograd.grad({f}.sum(), {g}, retain_graph=True, allow_unused=True)[0]",
        "{name} = torch.autograd.grad({f}.pow(2).sum(), w, create_graph=True)[0]",
        "{f}.retain_grad()",
        "{f}.register_hook(lambda a: a * {q})",
        "with torch.no_grad(): w.mul_({q})",
        "w.grad = None",
        "with torch.no_grad(): v -= 0.1 * v.grad",
    ],
    # Calls that fail when they run, with what they would have made still held.
    "fail": [
        "{name} = []\ntry:\n    {name}.append(F.embedding({i} + 9, w))\n"
        "    {name}.append({g} * 3)\n    {name}.append({f}.reshape({f}.shape))\n"
        "    float({name}[0].sum())\n"
        "except IndexError: pass",
        "{name} = [{f} * 2]\ntry: {name} += [{f}[{i} + 99], float({f}[{i} + 99].sum())]\n"
        "except IndexError: pass",
        "{name} = [{f} * 2]\ntry:\n    {name}.append({name}[0][{i} + 99])\n"
        "    {name}.append({name}[1] * 2)\n    float({name}[2].sum())\n"
        "except StaleError: raise\nexcept (IndexError, RuntimeError): pass",
        "{name} = []\ntry:\n    {name}.append(torch.linalg.cholesky(-{s} @ {s}.mT))\n"
        "    {name}.append({name}[0][0]); float({name}[1].sum())\n"
        "except StaleError: raise\nexcept RuntimeError: pass",
        "{name} = []\ntry:\n    {name}.append(F.embedding({i} + 9, w))\n"
        "    {name}[0].mul_(2); float({name}[0].sum())\nexcept IndexError: pass",
        "{name} = []\ntry:\n    {name}.append({f}.scatter(0, {i}[None] + 99, 1.0))\n"
        "    {name}[0].tolist()\nexcept StaleError: raise\nexcept RuntimeError: pass",
    ],
}

#: How often a line of each kind is drawn.
WEIGHTS = {
    "make": 4,
    "compute": 6,
    "mask": 2,
    "view": 5,
    "write": 8,
    "out": 1,
    "read": 2,
    "draw": 2,
    "grad": 1,
    "op": 2,
    "op in place": 2,
    "op out": 2,
    "block": 2,
    "fail": 0.5,
}
#: What eager itself does not repeat, gives as whatever was in memory, or tells last bits apart.
_NOT_REPEATED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("equal", "hash_tensor", "isclose", "linalg.lstsq", "resize_", "resize_as_"),
}
_N_SAMPLES = 40
_FLOATS = ("{f}", "{g}", "{e}")


def _function(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


class _NoTextError(Exception):
    """An argument that cannot be written in a line."""


def _written(value: Any, floats: Any) -> str:
    if isinstance(value, Tensor):
        if value.dtype == torch.bool:
            return "{m}"
        if value.dtype.is_floating_point:
            is_square = value.dim() >= 2 and value.shape[-1] == value.shape[-2] > 1
            return "{s}" if is_square else next(floats)
        if value.dtype == torch.int64:
            return "{i}" if value.dim() == 1 else "{j}"
        raise _NoTextError
    if isinstance(value, float):
        return f"float('{value}')"
    if isinstance(value, tuple | list):
        items = [_written(item, floats) for item in value]
        return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)},)"
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return repr(value)
    raise _NoTextError


def _call(op: OpInfo, sample: SampleInput) -> tuple[str, str, str] | None:
    """The first argument, the others and how a sample's call begins; None: it has no text."""
    floats = itertools.cycle(_FLOATS)
    try:
        first = _written(sample.input, floats)
        others = [_written(arg, floats) for arg in sample.args]
        others += [f"{word}={_written(arg, floats)}" for word, arg in sample.kwargs.items()]
    except _NoTextError:
        return None
    if _function(op.name) is not None:
        return f"torch.{op.name}(", first, ", ".join([first, *others])
    return f"{first}.{op.name}(", first, ", ".join(others)


def _samples(op: OpInfo) -> list[SampleInput]:
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs_func(op, "cpu", torch.float64, False)
        found = list(itertools.islice(samples, _N_SAMPLES))
    torch.set_rng_state(state)
    return found


def _targets(op: OpInfo, sample: SampleInput) -> tuple[str, str] | None:
    """What a call with `out=` is given: values that are there, and new ones that are empty."""
    try:
        made = op.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:
        return None
    tensors = pytree.tree_leaves(made)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    floats, ints = itertools.cycle("PQR"), itertools.cycle("JK")
    there = [f"{{{next(floats if t.is_floating_point() else ints)}}}" for t in tensors]
    empty = [f"torch.empty(0, dtype={tensor.dtype})" for tensor in tensors]
    if isinstance(made, Tensor):
        return there[0], empty[0]
    return f"({', '.join(there)},)", f"({', '.join(empty)},)"


@functools.cache
def calls(kind: str, name: str) -> list[str]:
    """Calls of an op in the forms of its samples; many of them fit no value of a program."""
    found: list[str] = []
    for op in _named(kind)[name]:
        for sample in _samples(op):
            call = _call(op, sample)
            if call is None:
                continue
            begin, first, arguments = call
            if kind == "op":
                found.append(f"{begin}{arguments})")
            elif kind == "op in place":
                method = getattr(op.inplace_variant, "__name__", "")
                rest = arguments.removeprefix(first).removeprefix(", ")
                found.append(f"{first}.{method}({rest})")
            else:
                targets = _targets(op, sample)
                if targets is not None:
                    there, empty = targets
                    found.append(f"{begin}{arguments}, out={there})")
                    found.append(f"{{name}} = {empty}; {begin}{arguments}, out={{name}})")
                    # and memory that is just what torch would make
                    found.append(
                        f"{{name}} = pytree.tree_map(torch.zeros_like, {begin}{arguments})); "
                        f"{begin}{arguments}, out={{name}})"
                    )
    return list(dict.fromkeys(found))


_HAS: dict[str, Callable[[OpInfo], bool]] = {
    "op": lambda op: _function(op.name) is not None or hasattr(Tensor, op.name),
    "op in place": lambda op: op.inplace_variant is not None,
    "op out": lambda op: bool(op.supports_out) and _function(op.name) is not None,
}


@functools.cache
def _named(kind: str) -> dict[str, list[OpInfo]]:
    named: dict[str, list[OpInfo]] = {}
    for op in op_db:
        is_public = op.name not in _NOT_REPEATED and not op.name.startswith("_")
        if torch.float64 in op.dtypes and is_public and _HAS[kind](op):
            named.setdefault(op.name, []).append(op)
    return named


@functools.cache
def names(kind: str) -> list[str]:
    """Every op of torch's list that takes calls of a kind."""
    return sorted(_named(kind))
