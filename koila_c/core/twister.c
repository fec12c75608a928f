/* SPDX-License-Identifier: Apache-2.0 */
/* twister.c - see twister.h. */
#include "twister.h"

enum { MIDDLE = 397 };

/* Return the contribution of a word and the next one to the word that replaces the first. */
static inline uint32_t
twist(uint32_t word, uint32_t next)
{
    uint32_t mixed = (word & 0x80000000U) | (next & 0x7fffffffU);
    return (mixed >> 1) ^ ((0U - (next & 1U)) & 0x9908b0dfU);
}

/* Replace all words by the next 624. No step reads a word that one of the 226 steps before it wrote, so that the compiler
 * can vectorize the loops. */
static void
make(uint32_t *words)
{
    for (int i = 0; i < KL_TWISTER_N - MIDDLE; i++) {
        words[i] = words[i + MIDDLE] ^ twist(words[i], words[i + 1]);
    }
    for (int i = KL_TWISTER_N - MIDDLE; i < KL_TWISTER_N - 1; i++) {
        words[i] = words[i + MIDDLE - KL_TWISTER_N] ^ twist(words[i], words[i + 1]);
    }
    words[KL_TWISTER_N - 1] = words[MIDDLE - 1] ^ twist(words[KL_TWISTER_N - 1], words[0]);
}

void
kl_twister_skip(KlTwister *twister, uint64_t n)
{
    uint64_t n_left = KL_TWISTER_N - twister->n_used;
    for (; n > n_left; n_left = KL_TWISTER_N) {
        n -= n_left;
        make(twister->words);
        twister->n_used = 0;
    }
    twister->n_used += (uint32_t)n;
}
