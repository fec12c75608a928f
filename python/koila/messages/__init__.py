# SPDX-License-Identifier: Apache-2.0
"""What people read: words, errors, tables, cards and memory plans."""
