/* SPDX-License-Identifier: Apache-2.0 */
/* twister.h - advances a Mersenne Twister (MT19937) past random numbers without computing them.
 *
 * The generator computes 624 words at once from the previous 624 (M. Matsumoto, T. Nishimura: Mersenne Twister, ACM
 * TOMACS 8, 1998) and returns them one by one, each tempered. Skipping computes only these words. It saves the
 * tempering, the conversion to numbers and the writes, which take most of the time of a draw. */
#pragma once

#include "base.h"

enum { KL_TWISTER_N = 624 };

typedef struct KlTwister {
    uint32_t words[KL_TWISTER_N]; /* the current 624 words */
    uint32_t n_used;              /* how many of them have been returned */
} KlTwister;

/* Skip `n` words: leave the generator in the state after `n` draws of one word each. */
void kl_twister_skip(KlTwister *twister, uint64_t n);
