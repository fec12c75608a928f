# SPDX-License-Identifier: Apache-2.0
"""Patch torch where it does not dispatch calls to lazy tensors."""
