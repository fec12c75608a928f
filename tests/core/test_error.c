/* SPDX-License-Identifier: Apache-2.0 */
/* test_error.c - a failure's words: formatted, cut to their room, and not needed. */
#include "base.h"

#include <string.h>

#include "check.h"

static void
test_words_and_status(void)
{
    KlError error = {.status = KL_OK};
    KlStatus status = kl_error_set(&error, KL_ERROR_INTERNAL, "%s: %d by %d", "matmul", 8, 32);
    CHECK(status == KL_ERROR_INTERNAL && error.status == KL_ERROR_INTERNAL);
    CHECK(strcmp(error.text, "matmul: 8 by 32") == 0);
}

static void
test_later_words_replace_earlier_ones(void)
{
    KlError error = {.status = KL_OK};
    (void)kl_error_set(&error, KL_ERROR_INTERNAL, "a long first text");
    (void)kl_error_set(&error, KL_ERROR_MEMORY, "short");
    CHECK(error.status == KL_ERROR_MEMORY);
    CHECK(strcmp(error.text, "short") == 0);
}

static void
test_long_words_are_cut(void)
{
    char words[2 * KL_ERROR_TEXT_MAX];
    memset(words, 'w', sizeof(words) - 1);
    words[sizeof(words) - 1] = '\0';
    struct {
        KlError error;
        char guard[8];
    } room = {.guard = "guarded"};
    (void)kl_error_set(&room.error, KL_ERROR_INTERNAL, "%s", words);
    CHECK(strlen(room.error.text) == KL_ERROR_TEXT_MAX - 1);
    CHECK(strcmp(room.guard, "guarded") == 0);
}

static void
test_nobody_wants_the_words(void)
{
    CHECK(kl_error_set(NULL, KL_ERROR_INTERNAL, "unheard %d", 1) == KL_ERROR_INTERNAL);
}

int
main(void)
{
    test_words_and_status();
    test_later_words_replace_earlier_ones();
    test_long_words_are_cut();
    test_nobody_wants_the_words();
    return check_result();
}
