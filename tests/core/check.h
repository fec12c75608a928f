/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - CHECK says where it failed and goes on; main() returns check_result(). */
#pragma once

#include <stdio.h>

static int n_checks_failed = 0;

#define CHECK(condition) CHECK_AT(__LINE__, condition)

/* In a helper: the line of the test that called it. */
#define CHECK_AT(line, condition) check((condition), #condition, __FILE__, line)

static inline void
check(int is_true, const char *condition, const char *file, int line)
{
    if (!is_true) {
        n_checks_failed++;
        (void)fprintf(stderr, "%s:%d: not true: %s\n", file, line, condition);
    }
}

static inline int
check_result(void)
{
    return n_checks_failed == 0 ? 0 : 1;
}
