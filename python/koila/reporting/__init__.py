# SPDX-License-Identifier: Apache-2.0
"""What ran, how, and how far: report() and the progress bar."""
