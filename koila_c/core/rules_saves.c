/* rules_saves.c - what torch keeps for backward, one function for each word of the column. */
#include "rules.h"

void
saves_nothing(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)call;
    (void)result;
    (void)saves;
}

void
saves_no_grad(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_nothing(call, result, saves);
}

void
saves_output(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)call;
    (void)result;
    saves->outputs = 1;
}
