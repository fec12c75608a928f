# SPDX-License-Identifier: Apache-2.0
"""Reductions over the batch, normalizations and running sums, in parts."""
