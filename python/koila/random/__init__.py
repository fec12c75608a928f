# SPDX-License-Identifier: Apache-2.0
"""Random numbers of programs: eager's own, in eager's order."""
