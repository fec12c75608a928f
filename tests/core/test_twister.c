/* SPDX-License-Identifier: Apache-2.0 */
/* test_twister.c - skipped words leave the generator where words that are drawn leave it. */
#include "twister.h"

#include "check.h"

/* As the authors of the generator seed it. */
static KlTwister
seeded(uint32_t seed)
{
    KlTwister twister = {.words = {seed}, .n_used = KL_TWISTER_N};
    for (uint32_t i = 1; i < KL_TWISTER_N; i++) {
        uint32_t last = twister.words[i - 1];
        twister.words[i] = 1812433253U * (last ^ (last >> 30)) + i;
    }
    return twister;
}

/* The next number that the generator gives. */
static uint32_t
draw(KlTwister *twister)
{
    kl_twister_skip(twister, 1);
    uint32_t word = twister->words[twister->n_used - 1];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680U;
    word ^= (word << 15) & 0xefc60000U;
    return word ^ (word >> 18);
}

/* The 10,000th number of seed 5489 is given in the C++ standard, [rand.predef]. */
static void
test_the_standards_number(void)
{
    KlTwister twister = seeded(5489);
    kl_twister_skip(&twister, 9999);
    CHECK(draw(&twister) == 4123659995U);
}

static void
test_as_drawn_one_by_one(void)
{
    const uint64_t sizes[] = {0, 1, 5, 623, 624, 625, 1247, 1248, 1249, 5000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        for (uint64_t before = 0; before < 1300; before += 13) {
            KlTwister skipped = seeded(7), drawn = seeded(7);
            kl_twister_skip(&skipped, before);
            kl_twister_skip(&skipped, sizes[i]);
            for (uint64_t n = before + sizes[i]; n > 0; n--) {
                (void)draw(&drawn);
            }
            CHECK(skipped.n_used == drawn.n_used && draw(&skipped) == draw(&drawn));
        }
    }
}

int
main(void)
{
    test_the_standards_number();
    test_as_drawn_one_by_one();
    return check_result();
}
