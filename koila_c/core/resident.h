/* SPDX-License-Identifier: Apache-2.0 */
/* resident.h - the resident private memory of this process, measured and bounded by a thread. */
#pragma once

#include "base.h"

/* Return the bytes of private memory that are resident now; -1 if the kernel does not say. */
int64_t kl_resident_bytes(void);

/* Return what glibc keeps of freed memory to the system; elsewhere do nothing. */
void kl_resident_return_free(void);

/* Let a thread sample until `kl_resident_stop`. Whenever the process comes near `bound` bytes, the thread returns free
 * memory to the system. Return false if the kernel does not say what is resident. If no thread can be started, only the
 * start and the end are measured. Watches at the same time are measured together, from the first one on. */
bool kl_resident_watch(int64_t bound);

/* End a watch. Return the most bytes that were resident; set `*n_returns` to how often free memory was returned. */
int64_t kl_resident_stop(int64_t *n_returns);
