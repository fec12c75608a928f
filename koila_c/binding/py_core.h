/* SPDX-License-Identifier: Apache-2.0 */
/* py_core.h - the small functions of koila._core, for the table of module.c, which says what each does. */
#ifndef KL_PY_CORE_H
#define KL_PY_CORE_H

#include "py.h"

PyObject *core_new_axis(PyObject *module, PyObject *ignored);
PyObject *core_input(PyObject *module, PyObject *args);
PyObject *core_like(PyObject *module, PyObject *args);
PyObject *core_force(PyObject *module, PyObject *object);
PyObject *core_real(PyObject *module, PyObject *object);
PyObject *core_is_input(PyObject *module, PyObject *object);
PyObject *core_keep_lazy(PyObject *module, PyObject *object);
PyObject *core_rows_dim(PyObject *module, PyObject *object);
PyObject *core_is_pending_here(PyObject *module, PyObject *object);
PyObject *core_describe(PyObject *module, PyObject *object);
PyObject *core_live(PyObject *module, PyObject *args);
PyObject *core_live_with_all(PyObject *module, PyObject *args);
PyObject *core_flush(PyObject *module, PyObject *ignored);
PyObject *core_has_known(PyObject *module, PyObject *ignored);
PyObject *core_has_numbers(PyObject *module, PyObject *ignored);
PyObject *core_read(PyObject *module, PyObject *object);
PyObject *core_leave(PyObject *module, PyObject *object);
PyObject *core_release(PyObject *module, PyObject *ignored);
PyObject *core_call(PyObject *module, PyObject *args);
PyObject *core_refresh_leaf(PyObject *module, PyObject *args);
PyObject *core_note_backward(PyObject *module, PyObject *ignored);
PyObject *core_is_busy(PyObject *module, PyObject *ignored);
PyObject *core_forget(PyObject *module, PyObject *ignored);
PyObject *core_abandon(PyObject *module, PyObject *ignored);
PyObject *core_leaves_of(PyObject *module, PyObject *tensor);
PyObject *core_storage(PyObject *module, PyObject *object);
PyObject *core_has_views(PyObject *module, PyObject *object);
PyObject *core_set_for_chunks(PyObject *module, PyObject *object);
PyObject *core_swap(PyObject *module, PyObject *args);
PyObject *core_has_draw(PyObject *module, PyObject *is_dead);
PyObject *core_waiting_draws(PyObject *module, PyObject *ignored);
PyObject *core_hook(PyObject *module, PyObject *args);
PyObject *core_retained(PyObject *module, PyObject *args);
PyObject *core_id(PyObject *module, PyObject *object);
PyObject *core_lazy_of(PyObject *module, PyObject *object);
PyObject *core_is_spent(PyObject *module, PyObject *object);
PyObject *core_note_drawn(PyObject *module, PyObject *id);
PyObject *core_set_type_attribute(PyObject *module, PyObject *args);
PyObject *core_set_attribute_by(PyObject *module, PyObject *args);
PyObject *core_set_busy(PyObject *module, PyObject *flag);
PyObject *core_check_leaves(PyObject *module, PyObject *ignored);
PyObject *core_close(PyObject *module, PyObject *ignored);
PyObject *core_pending_bytes(PyObject *module, PyObject *ignored);
PyObject *core_fix_malloc(PyObject *module, PyObject *size);
PyObject *core_memo(PyObject *module, PyObject *ignored);
PyObject *core_count_interpreters(PyObject *module, PyObject *n);
PyObject *core_count_dual_levels(PyObject *module, PyObject *n);
PyObject *core_set_region(PyObject *module, PyObject *region);
PyObject *core_fast_ways(PyObject *module, PyObject *ignored);
PyObject *core_fail_alloc_after(PyObject *module, PyObject *n);
PyObject *core_n_blocks(PyObject *module, PyObject *ignored);

#endif
