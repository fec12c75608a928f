# SPDX-License-Identifier: Apache-2.0
"""What users read: errors, tables, notebook cards and memory plans."""
