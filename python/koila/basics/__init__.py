# SPDX-License-Identifier: Apache-2.0
"""Modules that the others build on: settings, rows, the user's lines, torch's engine, switches."""
