# SPDX-License-Identifier: Apache-2.0
"""A recorded program as the core staged it: calls, values, schedules."""
