# SPDX-License-Identifier: Apache-2.0
"""In how many chunks a program runs, and which strategy; why, in words."""
