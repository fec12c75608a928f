/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h - chooses where to cut a body into segments, so that only one segment's graph exists at a time.
 *
 * A chunk runs through the segments without a graph and keeps only what one segment passes to the next; in the
 * backward pass each segment runs again with its graph. So the best cuts are where few bytes are passed on (the
 * residual stream of a transformer) and where each side saves about half of the activations. The head of a model,
 * its logits and their loss, may be a segment of its own. The time is linear in nodes and inputs. */
#pragma once

#include "stage.h"

/* Return the bytes that autograd saves for a node. */
int64_t kl_segment_kept(const KlTape *tape, KlNodeId id);

/* Cut the `n` nodes of one body over one axis, in call order, into at most `n_segments` segments, and store the
 * segment of each in `segment`, [n_nodes of the tape]. With few nodes, some segments may be empty. */
KlStatus kl_segment_cut(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t n_segments,
                        uint32_t *segment);

/* Cut the nodes of one body where each checkpoint of the user's begins. Cut once more among the calls after a checkpoint,
 * if they save more bytes than the cut would pass on. `*n_segments` becomes the number of segments. */
KlStatus kl_segment_regions(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t *segment,
                            uint32_t *n_segments);

/* Find where the head of a body begins, among its [n] nodes in call order from `*first` on. The head must hold at least
 * 1 / n_parts of the bytes that autograd saves; of the possible places, take the one that passes the fewest bytes on,
 * of equal ones the last. `*first` becomes its position, or n if there is none. `position` is scratch. */
KlStatus kl_segment_head(const KlTape *tape, const KlNodeId *nodes, size_t n, uint32_t n_parts,
                         uint32_t *position, size_t *first);
