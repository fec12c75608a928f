# SPDX-License-Identifier: Apache-2.0
"""Reports of the programs that ran, and the progress bar of those that run."""
