# SPDX-License-Identifier: Apache-2.0
"""A mistake of `make mutants`, and groups of tests that should see it."""

from __future__ import annotations

import dataclasses

#: Tests of whole steps that ask for a number of chunks.
STEPS = (
    "tests/test_step.py tests/test_step_gradients.py tests/test_step_inputs.py "
    "tests/test_counterexamples.py tests/test_counterexamples_rows.py "
    "tests/test_counterexamples_state.py tests/test_counterexamples_unseen.py "
    "tests/test_shared_memory.py tests/test_programs.py::test_same_as_eager "
    "tests/test_autocast.py tests/test_bad_input.py tests/test_boundary.py tests/test_draws.py "
    "tests/test_draws_between.py tests/test_draws_order.py tests/test_factories.py "
    "tests/test_generator.py tests/test_held_outputs.py tests/test_hooks.py "
    "tests/test_masked_writes.py tests/test_one_call.py tests/test_out.py tests/test_precision.py "
    "tests/test_run_now.py tests/test_scalars.py tests/test_tail.py tests/test_inplace_views.py "
    "tests/test_views_again.py tests/test_written_after_read.py"
)
PROGRAMS = "tests/test_programs.py::test_same_as_eager"
MEASURE = "tests/binding/test_py_measure.py tests/test_bytes.py"
WAITING = "tests/test_retained.py"
BOUNDARY = "tests/test_boundary.py tests/test_step_gradients.py tests/test_pairs.py"
FUSE = "tests/test_segments.py tests/test_second_axis.py"
BRIDGE = "tests/test_bridge.py tests/binding/test_py_bridge.py tests/test_written_behind_a_cut.py"
NOISE = "tests/test_draws_order.py tests/test_draws.py"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: a text of a file, once in it, and what stands in its place.

    `share` is how many of the tests must fail at least, None one test.
    """

    name: str
    path: str
    text: str
    instead: str
    tests: str
    share: float | None = None

    @property
    def is_chunked(self) -> bool:
        """Whether only tests that ask for chunks are run."""
        return self.share is not None
