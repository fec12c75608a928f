/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h - where a body is cut into segments, so that the graph of one of them is there at a time.
 *
 * A chunk goes through a body's segments without a graph, and keeps what one hands to the next; on the way
 * back each runs again with its graph. So a cut is worth most where little is handed on (the residual stream
 * of a transformer), and where what autograd keeps is halved. The head of a model, its scores and their loss, may
 * be a segment of its own. Linear in nodes and inputs. */
#ifndef KL_SEGMENT_H
#define KL_SEGMENT_H

#include "stage.h"

/* Cut the nodes of one body over one axis, [n] in the order of the calls, into at most `n_segments`, and note
 * in `segment`, [n_nodes of the tape], which each belongs to. Some may stay empty where there are few nodes. */
KlStatus kl_segment_cut(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t n_segments,
                        uint32_t *segment, KlError *error);

/* Cut the nodes of one body where bodies of checkpoints begin, and after them, before calls in none of which
 * autograd keeps more than a cut would hand on. `*n_segments` is the number of segments. */
KlStatus kl_segment_regions(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t *segment,
                            uint32_t *n_segments, KlError *error);

/* Where the head of a body begins, [n] nodes in the order of the calls, not before `*first`: with at least one
 * of `n_parts` of what autograd keeps, where the least is handed on to it, and of such places the last. `*first` becomes the
 * position; n: there is none. */
KlStatus kl_segment_head(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t n_parts,
                         uint32_t *position, size_t *first, KlError *error);

#endif
