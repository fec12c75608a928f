# SPDX-License-Identifier: Apache-2.0
"""A step in chunks with the package that is installed: what each wheel is tried with.

python tests/smoke.py    says where the extension is, or fails
"""

import torch

import koila

weight = torch.ones(2, requires_grad=True)
with koila.config(chunks=3):
    (koila.lazy(torch.ones(7, 2)) * weight).sum().backward()
assert koila.report().n_chunks == 3 and weight.grad.tolist() == [7, 7]
print(koila._core.__file__)
