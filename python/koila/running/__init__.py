# SPDX-License-Identifier: Apache-2.0
"""Run a program in chunks, forward and backward, and commit the results."""
