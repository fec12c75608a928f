/* SPDX-License-Identifier: Apache-2.0 */
/* test_reuse.c - what is not loaded is not changed. What torch's tensors then do is in tests/test_heap.py: sanitizers
 * have a malloc of their own. */
#include "reuse.h"

#include "check.h"

int
main(void)
{
    CHECK(!kl_reuse_freed("libnone.so"));
    CHECK(!kl_reuse_freed(""));
    return check_result();
}
