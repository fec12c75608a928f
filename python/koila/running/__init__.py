# SPDX-License-Identifier: Apache-2.0
"""A program runs in chunks, forward and back, and is committed."""
