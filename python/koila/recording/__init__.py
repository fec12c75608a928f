# SPDX-License-Identifier: Apache-2.0
"""Record calls of torch on lazies, or run those that cannot be recorded."""
