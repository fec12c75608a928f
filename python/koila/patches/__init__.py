# SPDX-License-Identifier: Apache-2.0
"""Every patch of torch that koila makes."""
