# SPDX-License-Identifier: Apache-2.0
"""In how many chunks a program runs, and which way; why, in words."""
