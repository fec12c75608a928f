/* SPDX-License-Identifier: Apache-2.0 */
/* base.h - limits and status codes shared by the whole core.
 *
 * The core is plain C without Python: numbers in, numbers out. A function that can fail returns a KlStatus and leaves
 * its arguments unchanged on failure. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KL_DIMS_MAX 8 /* calls on values with more dims run live */
#define KL_ID_NONE UINT32_MAX

typedef uint32_t KlNodeId;    /* a recorded call; record order is topological order */
typedef uint32_t KlValueId;   /* one output of a node, or a leaf */
typedef uint32_t KlAxisId;    /* the batch dimension of one batch; KL_ID_NONE: no axis */
typedef uint32_t KlStorageId; /* memory that values may share */

/* Names a parameter that the function's type requires and that it does not use. */
#define KL_UNUSED(name) unused_##name __attribute__((unused))

typedef enum {
    KL_OK = 0,
    KL_DECLINED,       /* not an error: the row cannot describe this call */
    KL_ILLEGAL,        /* torch itself refuses the call, and raises its own error when it runs */
    KL_ERROR_MEMORY,   /* an allocation of the core failed */
    KL_ERROR_INTERNAL, /* a bug of koila's: the place of an input does not fit its shape */
} KlStatus;

static inline int64_t
kl_larger(int64_t left, int64_t right)
{
    return left > right ? left : right;
}
