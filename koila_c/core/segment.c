/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c - looks for cuts near the places that divide the saved bytes of a body into equal shares. */
#include "segment.h"

#include "alloc.h"

/* The nodes of a body. Arrays are indexed by a node's position in the body. */
typedef struct Body {
    const KlTape *tape;
    const KlNodeId *nodes; /* [n] */
    size_t n;
    KlScratch scratch;
    const uint32_t *position; /* [n_nodes of the tape] a node's position, if it is in this body */
    uint32_t *last_read;      /* [n] the position of the last reader of the node's results */
    int64_t *kept;            /* [n + 1] bytes that autograd saves for the nodes before this one */
    int64_t *crosses;         /* [n + 1] bytes that a cut before this node would pass on */
} Body;

/* The bytes of a value that counts a chunk's sorted rows (NOTE [orders] in rules_order.c): more than any cut may pass
 * on, because a cut between such a count and its reader would separate rows that were sorted together. */
static const int64_t torn = INT64_C(1) << 48;

/* Return the position of the node that makes a value; n: it is not in this body. */
static size_t
maker_of(const Body *body, KlValueId value)
{
    KlNodeId id = value != KL_ID_NONE ? body->tape->values[value].node : KL_ID_NONE;
    bool is_here =
        id != KL_ID_NONE && body->position[id] < body->n && body->nodes[body->position[id]] == id;
    return is_here ? body->position[id] : body->n;
}

/* Note that each cut after position `from` and up to position `to` passes on `bytes` more. */
static void
cross(Body *body, size_t from, size_t to, int64_t bytes)
{
    body->crosses[from + 1] += bytes;
    if (to < body->n) {
        body->crosses[to + 1] -= bytes;
    }
}

int64_t
kl_segment_kept(const KlTape *tape, KlNodeId id)
{
    const KlNode *node = &tape->nodes[id];
    return kl_tape_n_bytes(tape, id) + node->saves.bytes_extra + node->saves.bytes_fixed;
}

/* Compute `kept` and `crosses`. A cut passes on every result that is read after it. Views count too, since a view that
 * is kept alone is copied. A value that is written in place after the cut is copied first, so it counts twice. */
static void
weigh(Body *body)
{
    const KlTape *tape = body->tape;
    for (size_t i = 0; i < body->n; i++) {
        const KlNode *node = &tape->nodes[body->nodes[i]];
        body->last_read[i] = (uint32_t)i;
        body->kept[i + 1] = body->kept[i] + kl_segment_kept(tape, body->nodes[i]);
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            KlValueId value = tape->inputs[node->first_input + k].value;
            size_t maker = maker_of(body, value);
            if (maker < body->n) {
                body->last_read[maker] = (uint32_t)i;
            }
            if (maker < body->n && k < 32 && (node->writes >> k & 1) != 0) {
                cross(body, maker, i, kl_meta_n_bytes(&tape->values[value].meta));
            }
        }
    }
    for (size_t i = 0; i < body->n; i++) {
        const KlNode *node = &tape->nodes[body->nodes[i]];
        for (uint32_t k = 0; k < node->n_outs; k++) {
            const KlMeta *meta = &tape->values[node->first_out + k].meta;
            bool is_of_chunk = meta->role == KL_ROLE_COUNTS || meta->role == KL_ROLE_OFFSETS;
            cross(body, i, body->last_read[i], is_of_chunk ? torn : kl_meta_n_bytes(meta));
        }
    }
    for (size_t i = 1; i <= body->n; i++) {
        body->crosses[i] += body->crosses[i - 1];
    }
}

/* Return the position after `first` before which to cut: of the places near the share `part` / `n_parts` of the saved
 * bytes, the one that passes on the fewest bytes; of equal ones, the nearest to the share. n: there is none. */
static size_t
find_cut(const Body *body, size_t first, uint32_t part, uint32_t n_parts)
{
    double whole = (double)body->kept[body->n];
    double share = whole * part / n_parts, reach = whole / (2.0 * n_parts);
    size_t best = body->n;
    double best_off = 0;
    for (size_t i = first + 1; i < body->n; i++) {
        double off = (double)body->kept[i] - share;
        off = off < 0 ? -off : off;
        if ((double)body->kept[i] - share > reach) {
            break; /* what is kept only grows */
        }
        bool is_better = best == body->n || body->crosses[i] < body->crosses[best] ||
                         (body->crosses[i] == body->crosses[best] && off < best_off);
        if (off <= reach && is_better && body->crosses[i] < torn) {
            best = i;
            best_off = off;
        }
    }
    return best;
}

/* Fill `body`; the caller frees its scratch. `position` is the caller's array of segments, which holds positions until
 * the segments are known. */
static KlStatus
open_body(Body *body, const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t *position)
{
    *body = (Body){.tape = tape, .nodes = nodes, .n = n, .position = position};
    body->last_read = kl_alloc_scratch(&body->scratch, n, sizeof(uint32_t));
    body->kept = kl_alloc_scratch(&body->scratch, n + 1, sizeof(int64_t));
    body->crosses = kl_alloc_scratch(&body->scratch, n + 1, sizeof(int64_t));
    if (body->scratch.is_short) {
        return KL_ERROR_MEMORY;
    }
    for (size_t i = 0; i < n; i++) {
        position[nodes[i]] = (uint32_t)i;
    }
    weigh(body);
    return KL_OK;
}

KlStatus
kl_segment_cut(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t n_segments,
               uint32_t *segment)
{
    Body body;
    KlStatus status = open_body(&body, tape, nodes, n, segment);
    uint32_t part_of = 0;
    size_t next = 0;
    for (uint32_t part = 1; part <= n_segments && status == KL_OK; part++) {
        size_t end = part < n_segments ? find_cut(&body, next, part, n_segments) : n;
        if (end == n && part < n_segments) {
            continue;
        }
        for (size_t i = next; i < end; i++) {
            segment[nodes[i]] = part_of;
        }
        part_of++;
        next = end;
    }
    kl_alloc_scratch_free(&body.scratch);
    return status;
}

static uint32_t
region_at(const Body *body, size_t i)
{
    return body->tape->nodes[body->nodes[i]].region;
}

/* Return where to cut the calls [first, end) after a checkpoint: in the first half of their saved bytes, the place that
 * passes on the fewest bytes; or `end`, if the calls behind it do not save more than the cut passes on. */
static size_t
find_end(const Body *body, size_t first, size_t end)
{
    size_t best = first;
    for (size_t i = first + 1; i < end && 2 * body->kept[i] <= body->kept[first] + body->kept[end];
         i++) {
        best = body->crosses[i] < body->crosses[best] ? i : best;
    }
    return body->kept[end] - body->kept[best] > body->crosses[best] ? best : end;
}

KlStatus
kl_segment_regions(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t *segment,
                   uint32_t *n_segments)
{
    Body body;
    KlStatus status = open_body(&body, tape, nodes, n, segment);
    uint32_t number = 0;
    for (size_t i = 0; i < n && status == KL_OK;) {
        size_t end = i, cut;
        while (end < n && region_at(&body, end) == region_at(&body, i)) {
            end++;
        }
        bool is_begin =
            i == 0 || region_at(&body, i) > region_at(&body, i - 1); /* later ones are larger */
        number += is_begin && i > 0;
        cut = is_begin ? end : find_end(&body, i, end);
        for (; i < end; i++) {
            number += i == cut;
            segment[nodes[i]] = number;
        }
    }
    *n_segments = number + 1;
    kl_alloc_scratch_free(&body.scratch);
    return status;
}

KlStatus
kl_segment_head(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t n_parts,
                uint32_t *position, size_t *first)
{
    Body body;
    KlStatus status = open_body(&body, tape, nodes, n, position);
    size_t best = n;
    double most = status == KL_OK ? (double)body.kept[n] * (n_parts - 1) / n_parts : -1;
    for (size_t i = *first > 0 ? *first : 1; most >= 0 && i < n && (double)body.kept[i] <= most;
         i++) {
        bool is_better = best == n || body.crosses[i] <= body.crosses[best];
        best = is_better && body.crosses[i] < torn ? i : best;
    }
    *first = best;
    kl_alloc_scratch_free(&body.scratch);
    return status;
}
