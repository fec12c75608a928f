/* SPDX-License-Identifier: Apache-2.0 */
/* rules_einsum.c - torch.einsum: its equation has the letters of NOTE [labels] in rules_labels.c.
 *
 * For two operands the rules follow ATen's einsum and sumproduct_pair, whose permutations determine
 * the strides of the result and which operands are copied. With more operands the strides are
 * unknown, and the saved bytes are an upper bound. A call with one operand is declined, because the
 * result may be a view of it. */
#include "rules.h"

#include <string.h>

enum { LETTERS_ALL_MAX = 64 };

/* A parsed equation. A letter is its character code; the dims of the ellipsis are 1 .. n_ellipsis. */
typedef struct {
    uint32_t n_operands;
    int32_t n_ellipsis;
    int32_t n_out;
    int32_t n_all; /* out, then what is summed */
    KlLabels operands[KL_LABELS_MAX];
    uint8_t all[LETTERS_ALL_MAX]; /* [n_all] */
    int64_t sizes[128];           /* by letter; 1 where it is not used */
} Equation;

/* Read one term up to `,`, `->` or the end. `dots` is where the ellipsis stands in it, or -1. */
static bool
read_term(const char **text, uint8_t *term, int32_t *n, int32_t *dots)
{
    const char *at = *text;
    *n = 0;
    *dots = -1;
    for (; *at != '\0' && *at != ',' && !(at[0] == '-' && at[1] == '>'); at++) {
        bool is_letter = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z');
        if (is_letter && *n < KL_DIMS_MAX) {
            term[(*n)++] = (uint8_t)*at;
        } else if (*at == '.' && at[1] == '.' && at[2] == '.' && *dots < 0) {
            *dots = *n;
            at += 2;
        } else if (*at != ' ') {
            return false;
        }
    }
    *text = at;
    return true;
}

/* Assign the letters of a term to the dims of an operand. */
static bool
label_operand(KlLabels *labels, const uint8_t *term, int32_t n, int32_t dots, int32_t n_dims,
              int32_t n_ellipsis)
{
    int32_t n_covered = n_dims - n;
    if (n_covered < 0 || (dots < 0 && n_covered > 0)) {
        return false;
    }
    int32_t dim = 0;
    for (int32_t i = 0; i <= n; i++) {
        for (int32_t k = 0; i == dots && k < n_covered; k++) {
            labels->of[dim++] = (uint8_t)(n_ellipsis - n_covered + k + 1);
        }
        if (i < n) {
            labels->of[dim++] = term[i];
        }
    }
    return true;
}

static bool
read_operands(const KlCall *call, const char **text, Equation *equation)
{
    uint8_t terms[KL_LABELS_MAX][KL_DIMS_MAX];
    int32_t n[KL_LABELS_MAX];
    int32_t dots[KL_LABELS_MAX];
    for (uint32_t i = 0; i < equation->n_operands; i++) {
        if (!read_term(text, terms[i], &n[i], &dots[i])) {
            return false;
        }
        int32_t n_covered = dots[i] < 0 ? 0 : call->inputs[i]->n_dims - n[i];
        if (n_covered > equation->n_ellipsis) {
            equation->n_ellipsis = n_covered;
        }
        bool is_last = i + 1 == equation->n_operands;
        if (!is_last && **text != ',') {
            return false;
        }
        *text += is_last ? 0 : 1;
    }
    for (uint32_t i = 0; i < equation->n_operands; i++) {
        if (!label_operand(&equation->operands[i], terms[i], n[i], dots[i], call->inputs[i]->n_dims,
                           equation->n_ellipsis)) {
            return false;
        }
    }
    return true;
}

static bool
read_sizes(const KlCall *call, Equation *equation, uint8_t *counts)
{
    for (int i = 0; i < 128; i++) {
        equation->sizes[i] = 1;
    }
    for (uint32_t i = 0; i < equation->n_operands; i++) {
        for (int32_t dim = 0; dim < call->inputs[i]->n_dims; dim++) {
            uint8_t letter = equation->operands[i].of[dim];
            int64_t *size = &equation->sizes[letter];
            counts[letter]++;
            if (*size != 1 && call->inputs[i]->shape[dim] != 1 &&
                *size != call->inputs[i]->shape[dim]) {
                return false;
            }
            *size = *size == 1 ? call->inputs[i]->shape[dim] : *size;
        }
    }
    return true;
}

static void
append_letter(Equation *equation, uint8_t letter)
{
    if (memchr(equation->all, letter, (size_t)equation->n_all) == NULL) {
        equation->all[equation->n_all++] = letter;
    }
}

static void
append_ellipsis(Equation *equation)
{
    for (int32_t i = 0; i < equation->n_ellipsis; i++) {
        append_letter(equation, (uint8_t)(i + 1));
    }
}

/* Find the letters of the result, explicit or implied, and then all others, in torch's order. */
static bool
read_result(const char *text, Equation *equation, const uint8_t *counts)
{
    if (*text == '\0') {
        append_ellipsis(equation);
        for (uint8_t letter = 'A'; letter <= 'z'; letter++) {
            if (counts[letter] == 1) {
                append_letter(equation, letter);
            }
        }
        equation->n_out = equation->n_all;
    } else {
        uint8_t term[KL_DIMS_MAX];
        int32_t n = 0, dots = -1;
        text += 2;
        if (!read_term(&text, term, &n, &dots) || *text != '\0') {
            return false;
        }
        for (int32_t i = 0; i <= n; i++) {
            if (i == dots) {
                append_ellipsis(equation);
            }
            if (i < n && counts[term[i]] == 0) {
                return false;
            }
            if (i < n) {
                append_letter(equation, term[i]);
            }
        }
        equation->n_out = equation->n_all;
        if (equation->n_out != n + (dots < 0 ? 0 : equation->n_ellipsis)) {
            return false; /* it has a letter twice */
        }
    }
    append_ellipsis(equation);
    for (uint8_t letter = 'A'; letter <= 'z'; letter++) {
        if (counts[letter] > 0) {
            append_letter(equation, letter);
        }
    }
    return true;
}

/* Parse the equation. Return false if torch refuses it, or the rules do not describe it. */
static bool
read_equation(const KlCall *call, Equation *equation)
{
    const char *text = kl_rules_text(call, 0, NULL);
    uint8_t counts[128] = {0};
    *equation = (Equation){.n_operands = call->n_inputs};
    if (text == NULL || call->n_inputs < 2 || call->n_inputs > KL_LABELS_MAX ||
        call->args[1].kind != KL_ARG_VALUES) {
        return false;
    }
    return read_operands(call, &text, equation) && (*text == '\0' || *text == '-') &&
           read_sizes(call, equation, counts) && read_result(text, equation, counts) &&
           equation->n_out <= KL_DIMS_MAX;
}

/* Align an operand as einsum does, with a dim for each letter; a letter that occurs twice takes the diagonal. */
static void
align_operand(const Equation *equation, const KlMeta *meta, const KlLabels *labels, KlMeta *aligned)
{
    *aligned = *meta;
    aligned->n_dims = equation->n_all;
    for (int32_t i = 0; i < equation->n_all; i++) {
        aligned->shape[i] = 1;
        aligned->strides[i] = 0;
        for (int32_t dim = 0; dim < meta->n_dims; dim++) {
            if (labels->of[dim] == equation->all[i]) {
                aligned->shape[i] = meta->shape[dim];
                aligned->strides[i] += meta->strides[dim];
            }
        }
    }
}

/* Dims in both operands, in the left only, the rest of the result, and dims that the product sums over. */
typedef enum { BOTH, LEFT, RIGHT, SUMMED } Group;

/* The steps of sumproduct_pair for two aligned operands. */
typedef struct {
    KlMeta operands[2];
    bool is_summed[2];             /* dims that only this one has are summed before: a new tensor */
    bool is_product;               /* nothing is summed over both: an elementwise product */
    bool is_swapped;               /* right @ left, which stores the result in the order wanted */
    int32_t order[4][KL_DIMS_MAX]; /* [n] the dims of each Group */
    int32_t n[4];
} Pair;

static void
plan_pair(const KlCall *call, const Equation *equation, Pair *pair)
{
    *pair = (Pair){.is_product = true};
    for (int i = 0; i < 2; i++) {
        align_operand(equation, call->inputs[i], &equation->operands[i], &pair->operands[i]);
    }
    for (int32_t dim = 0; dim < equation->n_all; dim++) {
        int64_t *left = &pair->operands[0].shape[dim], *right = &pair->operands[1].shape[dim];
        if (dim < equation->n_out) {
            Group group = *left == 1 ? RIGHT : *right == 1 ? LEFT : BOTH;
            pair->order[group][pair->n[group]++] = dim;
        } else if (*left != 1 && *right != 1) {
            pair->order[SUMMED][pair->n[SUMMED]++] = dim;
            pair->is_product = false;
        } else {
            /* summed before, or of size 1: from here on it is a dim like those of the result */
            pair->is_summed[0] = pair->is_summed[0] || *left != 1;
            pair->is_summed[1] = pair->is_summed[1] || *right != 1;
            *left = 1;
            *right = 1;
            pair->order[RIGHT][pair->n[RIGHT]++] = dim;
        }
    }
    pair->is_swapped = pair->n[LEFT] > 0 && pair->n[RIGHT] > 0 &&
                       pair->order[RIGHT][pair->n[RIGHT] - 1] < pair->order[LEFT][0];
}

/* Whether bmm's operand is a view of the einsum operand, and the strides of that are known. */
static bool
is_pair_view(const Pair *pair, int operand)
{
    const KlMeta *meta = &pair->operands[operand];
    bool is_right = (operand == 1) != pair->is_swapped;
    Group own = operand == 0 ? LEFT : RIGHT;
    Group groups[3] = {BOTH, is_right ? SUMMED : own, is_right ? own : SUMMED};
    KlMeta permuted = {.n_dims = 0, .is_strided = true};
    KlMeta merged = {.n_dims = 3, .shape = {1, 1, 1}};
    for (int part = 0; part < 3; part++) {
        const int32_t *dims = pair->order[groups[part]];
        for (int32_t i = 0; i < pair->n[groups[part]]; i++) {
            permuted.shape[permuted.n_dims] = meta->shape[dims[i]];
            permuted.strides[permuted.n_dims++] = meta->strides[dims[i]];
            merged.shape[part] *= meta->shape[dims[i]];
        }
    }
    return kl_rules_view_strides(&permuted, &merged);
}

/* Set the strides of the result: those of bmm's result, permuted to the order of the letters. */
static void
set_pair_strides(const Equation *equation, const Pair *pair, KlMeta *out)
{
    KlMeta produced = {.n_dims = 0};
    int32_t dims[KL_DIMS_MAX];
    bool is_swapped = pair->is_swapped;
    Group groups[4] = {BOTH, is_swapped ? RIGHT : LEFT, SUMMED, is_swapped ? LEFT : RIGHT};
    for (int part = 0; part < 4; part++) {
        for (int32_t i = 0; i < pair->n[groups[part]]; i++) {
            int32_t dim = pair->order[groups[part]][i];
            int64_t left = pair->operands[0].shape[dim], right = pair->operands[1].shape[dim];
            dims[produced.n_dims] = dim;
            produced.shape[produced.n_dims++] = groups[part] == SUMMED ? 1
                                                : left == 1            ? right
                                                                       : left;
        }
    }
    kl_meta_set_contiguous(&produced);
    KlMeta permuted = produced;
    for (int32_t i = 0; i < produced.n_dims; i++) {
        permuted.shape[dims[i]] = produced.shape[i];
        permuted.strides[dims[i]] = produced.strides[i];
    }
    if (equation->n_all > equation->n_out) {
        (void)kl_rules_view_strides(&permuted, out);
    } else {
        memcpy(out->strides, permuted.strides, sizeof(out->strides));
        out->is_strided = true;
    }
}

KL_SHAPE(einsum)
{
    Equation equation;
    if (!read_equation(call, &equation)) {
        return KL_DECLINED;
    }
    KlMeta *out = kl_rules_outs(result, 1);
    for (; out->n_dims < equation.n_out; out->n_dims++) {
        out->shape[out->n_dims] = equation.sizes[equation.all[out->n_dims]];
    }
    if (call->n_inputs == 2 && equation.n_all <= KL_DIMS_MAX) {
        Pair pair;
        plan_pair(call, &equation, &pair);
        const KlMeta *operands[2] = {&pair.operands[0], &pair.operands[1]};
        bool is_summed = pair.is_summed[0] || pair.is_summed[1] || equation.n_all > equation.n_out;
        if (!pair.is_product) {
            set_pair_strides(&equation, &pair, out);
        } else if (!is_summed) {
            kl_rules_iterate(out, operands, 2, false);
        }
    }
    return KL_OK;
}

KL_PLACE(einsum)
{
    Equation equation;
    (void)read_equation(call, &equation);
    KlWiring wiring = {.reduce = KL_REDUCE_SUM};
    memcpy(wiring.inputs, equation.operands, sizeof(equation.operands));
    memcpy(wiring.outs[0].of, equation.all, (size_t)equation.n_out);
    return kl_rules_wire(call, result, &wiring);
}

static void
save_operand(const KlCall *call, const KlInferred *result, const Pair *pair, KlSaves *saves,
             int operand)
{
    const KlMeta *meta = &pair->operands[operand];
    bool is_known = meta->is_strided;
    bool is_view =
        !pair->is_summed[operand] && (pair->is_product || !is_known || is_pair_view(pair, operand));
    if (is_view) {
        saves->inputs |= UINT64_C(1) << operand;
    }
    if (!is_view || (!is_known && !pair->is_product)) {
        kl_rules_save_new(result, saves, kl_meta_n_elements(meta), call->inputs[operand]->dtype);
    }
}

KL_SAVES(einsum)
{
    Equation equation;
    (void)read_equation(call, &equation);
    if (call->n_inputs == 2 && equation.n_all <= KL_DIMS_MAX) {
        Pair pair;
        plan_pair(call, &equation, &pair);
        for (int operand = 0; operand < 2; operand++) {
            if (call->inputs[1 - operand]->requires_grad) {
                save_operand(call, result, &pair, saves, operand);
            }
        }
        return;
    }
    saves_all(call, result, saves);
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        kl_rules_save_new(result, saves, kl_meta_n_elements(call->inputs[i]),
                          result->outs[0].dtype);
    }
}
