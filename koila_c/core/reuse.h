/* SPDX-License-Identifier: Apache-2.0 */
/* reuse.h - memory that a library freed is used again for blocks of the same size. With glibc only. */
#pragma once

#include <stdbool.h>

/* Let the blocks that the loaded library with this file name aligns use freed blocks of the same size again, from now on
 * and until the process ends. Return whether they do: not so if the library is not loaded, or if it does not take its
 * blocks from glibc. May be called again. */
bool kl_reuse_freed(const char *library);
