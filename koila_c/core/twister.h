/* SPDX-License-Identifier: Apache-2.0 */
/* twister.h - the state of a Mersenne Twister, MT19937, moved past numbers that nobody wants.
 *
 * Such a generator makes 624 words at once from the 624 before (M. Matsumoto, T. Nishimura: Mersenne Twister,
 * ACM TOMACS 8, 1998), and hands them out one by one, each tempered. What is skipped is made, and not tempered,
 * nor turned into numbers, nor written anywhere: that is most of what a draw takes. */
#ifndef KL_TWISTER_H
#define KL_TWISTER_H

#include "base.h"

enum { KL_TWISTER_N = 624 };

typedef struct KlTwister {
    uint32_t words[KL_TWISTER_N]; /* made last */
    uint32_t n_used;              /* of these, handed out: KL_TWISTER_N at most */
} KlTwister;

/* Skip `n` words: the generator is where `n` draws of one word each would leave it. */
void kl_twister_skip(KlTwister *twister, uint64_t n);

#endif
