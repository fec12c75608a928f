/* SPDX-License-Identifier: Apache-2.0 */
/* autocast.c - torch's lists of ops under autocast, and casting metas by them. An op that is on no list
 * runs on what it is given. Composite ops are listed by what their parts do. */
#include "autocast.h"

#include <string.h>

#include "rules.h"

typedef enum {
    CAST_NONE = 0,
    CAST_LOWER,   /* to the lower dtype */
    CAST_FLOAT,   /* to float32 */
    CAST_REDUCE,  /* to float32, unless the call names a dtype */
    CAST_WIDEST,  /* to the widest dtype among the inputs */
    CAST_ERROR,   /* torch refuses the op under autocast */
    CAST_LAYER,   /* recurrent layers whose results are lowered, from float32 inputs */
    CAST_CELL,    /* recurrent layers whose results are not, from float32 inputs */
    CAST_EINSUM,  /* lowered where two operands are contracted */
    CAST_PADDING, /* float32 where it reflects or replicates */
    CAST_UNKNOWN,
} Cast;

/* Names between spaces, with one before the first and one after the last. */
typedef struct List {
    Cast cast;
    const char *names;
} List;

static const List cpu_lists[] = {
    {CAST_LOWER, " addbmm addmm affine_grid_generator baddbmm bmm conv1d conv2d conv3d "
                 "conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm prelu "
                 "rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention "},
    {CAST_FLOAT, " adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy "
                 "binary_cross_entropy_with_logits cdist cosine_embedding_loss cross_entropy_loss "
                 "ctc_loss grid_sampler hinge_embedding_loss huber_loss kl_div l1_loss "
                 "margin_ranking_loss max_pool3d mse_loss multi_margin_loss multilabel_margin_loss "
                 "nll_loss nll_loss2d nll_loss_nd poisson_nll_loss prod smooth_l1_loss "
                 "soft_margin_loss triplet_margin_loss "},
    {CAST_WIDEST, " cat index_copy stack "},
    {CAST_LAYER, " lstm rnn_relu rnn_tanh "},
    {CAST_UNKNOWN, " gradient_of packed_gru packed_lstm packed_rnn_relu packed_rnn_tanh "},
    {CAST_CELL, " gru gru_cell lstm_cell "},
    {CAST_EINSUM, " einsum "},
    {CAST_PADDING, " pad "},
};

static const List cuda_lists[] = {
    {CAST_LOWER, " addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d "
                 "conv_transpose1d conv_transpose2d conv_transpose3d einsum gru_cell linear "
                 "lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell "
                 "scaled_dot_product_attention "},
    {CAST_FLOAT,
     " _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d "
     "_upsample_nearest_exact2d _upsample_nearest_exact3d acos asin "
     "binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity "
     "cross_entropy_loss erfinv exp expm1 group_norm hinge_embedding_loss huber_loss kl_div "
     "l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss "
     "multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd "
     "poisson_nll_loss pow reciprocal rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss "
     "softplus square tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d "
     "upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
     "upsample_trilinear3d "},
    {CAST_REDUCE, " cumprod cumsum linalg_vector_norm log_softmax prod softmax sum "},
    {CAST_WIDEST,
     " addcdiv addcmul atan2 bilinear cat dot grid_sampler index_copy scatter_add stack "},
    {CAST_ERROR, " binary_cross_entropy "},
    {CAST_UNKNOWN,
     " affine_grid_generator gradient_of gru lstm packed_gru packed_lstm packed_rnn_relu "
     "packed_rnn_tanh pairwise_distance rnn_relu rnn_tanh "},
};

static Cast
find(const List *lists, size_t n, const char *name)
{
    size_t length = strlen(name);
    for (size_t i = 0; i < n; i++) {
        const char *at = lists[i].names;
        while ((at = strstr(at, name)) != NULL) {
            if (at[-1] == ' ' && at[length] == ' ') {
                return lists[i].cast;
            }
            at += length;
        }
    }
    return CAST_NONE;
}

/* autocast leaves float64 and all that is not floating alone. */
static bool
is_eligible(const KlMeta *meta)
{
    return meta != NULL && (meta->dtype == KL_DTYPE_FLOAT16 || meta->dtype == KL_DTYPE_BFLOAT16 ||
                            meta->dtype == KL_DTYPE_FLOAT32);
}

/* Whether two operands of "ab,bc->ac" share a letter that the result does not have. Without an arrow the
 * result has the letters that occur once. */
static bool
is_contracted(const char *equation)
{
    const char *comma = strchr(equation, ',');
    const char *arrow = strstr(equation, "->");
    for (const char *at = equation; comma != NULL && at < comma; at++) {
        bool is_letter = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z');
        const char *again = is_letter ? strchr(comma, *at) : NULL;
        bool is_shared = again != NULL && (arrow == NULL || again < arrow);
        if (is_shared && (arrow == NULL || strchr(arrow, *at) == NULL)) {
            return true;
        }
    }
    return false;
}

/* An einsum of one operand, or with no product over a letter, is made of ops on no list. */
static Cast
judge_einsum(const KlCall *call)
{
    if (call->args[0].kind != KL_ARG_TEXT || call->n_inputs > 2) {
        return CAST_UNKNOWN;
    }
    return is_contracted(call->args[0].u.text) ? CAST_LOWER : CAST_NONE;
}

/* The word "mode" of pad is its third. */
static Cast
judge_padding(const KlCall *call)
{
    const KlArg *mode = &call->args[2];
    bool is_text = mode->kind == KL_ARG_TEXT;
    bool is_listed =
        is_text && (strcmp(mode->u.text, "reflect") == 0 || strcmp(mode->u.text, "replicate") == 0);
    return is_listed ? CAST_FLOAT : CAST_NONE;
}

static bool
names_dtype(const KlCall *call)
{
    for (uint32_t i = 0; i < call->n_args; i++) {
        if (call->args[i].kind == KL_ARG_DTYPE) {
            return true;
        }
    }
    return false;
}

static bool
is_all_float32(const KlCall *call)
{
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        if (is_eligible(call->inputs[i]) && call->inputs[i]->dtype != KL_DTYPE_FLOAT32) {
            return false;
        }
    }
    return true;
}

static Cast
judge(const KlAutocast *autocast, const KlCall *call)
{
    const char *name = call->row->name;
    Cast cast = autocast->is_cuda
                    ? find(cuda_lists, sizeof(cuda_lists) / sizeof(cuda_lists[0]), name)
                    : find(cpu_lists, sizeof(cpu_lists) / sizeof(cpu_lists[0]), name);
    switch (cast) {
    case CAST_REDUCE:
        return names_dtype(call) ? CAST_NONE : CAST_FLOAT;
    case CAST_EINSUM:
        return judge_einsum(call);
    case CAST_PADDING:
        return judge_padding(call);
    case CAST_LAYER:
        return is_all_float32(call) ? CAST_LOWER : CAST_UNKNOWN;
    case CAST_CELL:
        return is_all_float32(call) ? CAST_NONE : CAST_UNKNOWN;
    default:
        return cast;
    }
}

/* float32 if any input is, else the lower dtype; false where there are others. */
static bool
find_widest(const KlAutocast *autocast, const KlCall *call, KlDtype *widest)
{
    *widest = autocast->lower;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        if (input == NULL || (!is_eligible(input) && input->dtype != KL_DTYPE_FLOAT64)) {
            continue;
        }
        if (input->dtype == KL_DTYPE_FLOAT32) {
            *widest = KL_DTYPE_FLOAT32;
        } else if (input->dtype != autocast->lower) {
            return false;
        }
    }
    return true;
}

/* Whether all that takes part is float64 or not floating: autocast does nothing then. */
static bool
is_any_eligible(const KlCall *call)
{
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        if (is_eligible(call->inputs[i])) {
            return true;
        }
    }
    return false;
}

KlStatus
kl_autocast_inputs(const KlAutocast *autocast, const KlCall *call, KlMeta *cast,
                   const KlMeta **seen)
{
    Cast how = is_any_eligible(call) ? judge(autocast, call) : CAST_NONE;
    KlDtype to = autocast->lower;
    if (how == CAST_ERROR || how == CAST_UNKNOWN ||
        (how == CAST_WIDEST && !find_widest(autocast, call, &to))) {
        return KL_DECLINED;
    }
    to = how == CAST_FLOAT ? KL_DTYPE_FLOAT32 : to;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        seen[i] = input;
        if (how != CAST_NONE && is_eligible(input) && input->dtype != to) {
            cast[i] = *input;
            cast[i].dtype = to;
            kl_rules_preserve(&cast[i], input);
            seen[i] = &cast[i];
        }
    }
    return KL_OK;
}

void
kl_autocast_saves(const KlCall *call, const KlMeta *const *seen, KlSaves *saves)
{
    for (uint32_t i = 0; i < call->n_inputs && i < 64; i++) {
        if (seen[i] == call->inputs[i] || (saves->inputs >> i & 1) == 0) {
            continue;
        }
        int64_t bytes = kl_meta_n_bytes(seen[i]);
        saves->inputs &= ~(UINT64_C(1) << i);
        if (kl_place_is_rows(&seen[i]->place)) {
            saves->is_extra_rows = saves->is_extra_rows || saves->bytes_extra == 0;
            saves->bytes_extra += bytes;
        } else {
            saves->bytes_fixed += bytes;
        }
    }
}
