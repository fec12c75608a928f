# SPDX-License-Identifier: Apache-2.0
"""What is done with each call of torch that a lazy is given to."""
