# SPDX-License-Identifier: Apache-2.0
"""What all of koila stands on: settings, rows, lines of the user, torch's engine and switches."""
