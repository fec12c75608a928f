# SPDX-License-Identifier: Apache-2.0
"""Memory: the bytes that are free, those that tensors take, those that a step will need."""
