# SPDX-License-Identifier: Apache-2.0
"""Bytes: what there is, what is held, what a step will take."""
