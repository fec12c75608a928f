/* SPDX-License-Identifier: Apache-2.0 */
/* test_segment.c - a body is cut where little is handed on, into parts that keep about the same. */
#include "segment.h"

#include "program.h"
#include "record.h"

#define MAX_NODES 64

/* All calls of the program, in their order; returns how many. */
static size_t
all_nodes(const Program *p, KlNodeId nodes[MAX_NODES])
{
    CHECK(p->tape.n_nodes <= MAX_NODES);
    for (size_t i = 0; i < p->tape.n_nodes; i++) {
        nodes[i] = (KlNodeId)i;
    }
    return p->tape.n_nodes;
}

static uint32_t
cut(Program *p, uint32_t n_segments, uint32_t *segment)
{
    KlNodeId nodes[MAX_NODES];
    size_t n = all_nodes(p, nodes);
    CHECK(kl_segment_cut(&p->tape, nodes, n, n_segments, segment) == KL_OK);
    uint32_t last = 0;
    for (size_t i = 0; i < n; i++) {
        CHECK(segment[i] == last || segment[i] == last + 1); /* in the order of the calls */
        last = segment[i];
    }
    return last + 1;
}

/* Wide between, narrow where a block ends: cuts are made at the ends of blocks. */
static void
test_cuts_are_narrow(void)
{
    Program p = {0};
    Start s = start(&p);
    KlValueId wide = leaf(&p, with_grad(TENSOR(FLOAT32, 64, 3)));
    KlValueId narrow = leaf(&p, with_grad(TENSOR(FLOAT32, 3, 64)));
    KlValueId h = s.h;
    KlNodeId ends[4];
    for (int i = 0; i < 4; i++) {
        KlValueId inner = call1(&p, "exp", call2(&p, "linear", h, wide));
        h = call2(&p, "linear", call1(&p, "sin", inner), narrow);
        ends[i] = node_of(&p, h);
    }
    uint32_t segment[MAX_NODES] = {0};
    CHECK(cut(&p, 1, segment) == 1);
    CHECK(cut(&p, 4, segment) == 4);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(segment[ends[i]] == i && (i == 3 || segment[ends[i] + 1] == i + 1));
    }
    CHECK(cut(&p, 2, segment) == 2 && segment[ends[1]] == 0 && segment[ends[1] + 1] == 1);
    program_fini(&p);
}

/* The head begins at the last of the narrowest places that leave it half of what is kept. */
static void
test_head(void)
{
    Program p = {0};
    Start s = start(&p);
    KlValueId narrow = leaf(&p, with_grad(TENSOR(FLOAT32, 3, 3)));
    KlValueId wide = leaf(&p, with_grad(TENSOR(FLOAT32, 64, 3)));
    KlValueId h = call1(&p, "sin", call1(&p, "exp", call2(&p, "linear", s.h, narrow)));
    KlNodeId last = node_of(&p, h);
    (void)call1(&p, "exp", call1(&p, "sin", call2(&p, "linear", h, wide)));
    KlNodeId nodes[MAX_NODES];
    uint32_t position[MAX_NODES] = {0};
    size_t n = all_nodes(&p, nodes), first = 0;
    CHECK(kl_segment_head(&p.tape, nodes, n, 2, position, &first) == KL_OK);
    CHECK(nodes[first] == last + 1);
    first = (size_t)last + 3; /* not before that: less than half is left */
    CHECK(kl_segment_head(&p.tape, nodes, n, 2, position, &first) == KL_OK && first == n);
    program_fini(&p);
}

/* What is written is not handed on, where it can be helped: it would be copied first. */
static void
test_no_cut_before_a_write(void)
{
    Program p = {0};
    Start s = start(&p);
    KlValueId h = s.h;
    for (int i = 0; i < 4; i++) {
        h = call1(&p, "relu_", call1(&p, "exp", h));
    }
    uint32_t segment[MAX_NODES] = {0};
    CHECK(cut(&p, 3, segment) == 3);
    for (size_t i = 1; i < p.tape.n_nodes; i++) {
        CHECK(p.tape.nodes[i].writes == 0 || segment[i] == segment[i - 1]);
    }
    program_fini(&p);
}

/* More segments than calls: as many as there are, at most. */
static void
test_more_than_there_are(void)
{
    Program p = {0};
    Start s = start(&p);
    (void)call1(&p, "exp", s.h);
    uint32_t segment[MAX_NODES] = {0};
    CHECK(cut(&p, 9, segment) <= 2);
    program_fini(&p);
}

static void
test_no_memory(void)
{
    Program p = {0};
    Start s = start(&p);
    const KlNodeId nodes[] = {node_of(&p, s.h), node_of(&p, call1(&p, "exp", s.h))};
    uint32_t segment[2] = {0};
    int64_t n_blocks = kl_alloc_n_blocks(), n_refused = 0;
    KlStatus status = KL_ERROR_MEMORY;
    while (status != KL_OK) {
        kl_alloc_fail_after(n_refused++);
        status = kl_segment_cut(&p.tape, nodes, 2, 2, segment);
        kl_alloc_fail_after(-1);
        CHECK(kl_alloc_n_blocks() == n_blocks);
    }
    CHECK(n_refused > 3);
    size_t first = 0;
    for (n_refused = 0, status = KL_ERROR_MEMORY; status != KL_OK; n_refused++) {
        kl_alloc_fail_after(n_refused);
        status = kl_segment_head(&p.tape, nodes, 2, 2, segment, &first);
        kl_alloc_fail_after(-1);
        CHECK(kl_alloc_n_blocks() == n_blocks);
    }
    CHECK(n_refused > 3);
    program_fini(&p);
}

int
main(void)
{
    test_cuts_are_narrow();
    test_head();
    test_no_cut_before_a_write();
    test_more_than_there_are();
    test_no_memory();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
