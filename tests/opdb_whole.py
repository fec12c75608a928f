# SPDX-License-Identifier: Apache-2.0
"""Entries of op_db that are never cut, by the reason: all others are, in one of their samples."""

from __future__ import annotations

from opdb_chunks import NO_ROW, NO_ROWS, WHOLE

_NAMES = {
    NO_ROWS: """
    __rand__ __ror__ __rxor__ arange bincount bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor broadcast_shapes cartesian_prod empty
    empty_permuted empty_strided eye full gcd imag istft item lcm linspace
    linspace.tensor_overload logspace logspace.tensor_overload
    nn.functional.batch_norm.without_cudnn nn.functional.ctc_loss nn.functional.one_hot
    nn.functional.silu.complex ones randint randn scalar_tensor signal.windows.bartlett
    signal.windows.blackman signal.windows.cosine signal.windows.exponential
    signal.windows.gaussian signal.windows.general_cosine signal.windows.general_hamming
    signal.windows.hamming signal.windows.hann signal.windows.kaiser signal.windows.nuttall
    slice_scatter sparse.mm.reduce sparse.sampled_addmm torch._scaled_mm torch._scaled_mm_v2
    torch.ops.aten._efficient_attention_forward torch.ops.aten._flash_attention_forward
    tril_indices triu_indices unravel_index view_as_real zeros
    """,
    # Most run at once, on the whole batch. Those that the table knows by name: losses whose targets
    # need a gradient, casts to what they are, draws that are made at once.
    NO_ROW: """
    H _batch_norm_with_update _chunk_cat _native_batch_norm_legit _segment_reduce.lengths
    _segment_reduce.offsets _softmax_backward_data _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa alias_copy allclose aminmax
    angle argwhere as_strided as_strided.partial_views as_strided_copy as_strided_scatter
    atleast_1d block_diag cauchy cdouble cfloat chalf cholesky cholesky_inverse cholesky_solve
    combinations conj conj_physical contiguous corrcoef cov diag diag_embed diagflat
    diagonal_copy diagonal_scatter dist equal expand_copy exponential fft.hfft fft.hfft2
    fft.hfftn fft.ifft fft.ihfft fft.ihfft2 fft.ihfftn fill frexp geometric geqrf gradient
    grid_sampler_2d grid_sampler_3d hash_tensor heaviside histogram histogramdd igamma igammac
    isin jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary
    jiterator_binary_return_by_ref jiterator_unary kron ldexp linalg.cholesky linalg.cholesky_ex
    linalg.cond linalg.det linalg.diagonal linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh
    linalg.householder_product linalg.inv linalg.inv_ex linalg.ldl_factor linalg.ldl_factor_ex
    linalg.ldl_solve linalg.lstsq linalg.lstsq.grad_oriented linalg.lu linalg.lu_factor
    linalg.lu_factor_ex linalg.lu_solve linalg.matrix_power linalg.matrix_rank
    linalg.matrix_rank.hermitian linalg.pinv linalg.pinv.hermitian linalg.qr linalg.slogdet
    linalg.solve linalg.solve_ex linalg.solve_triangular linalg.svd linalg.svdvals
    linalg.tensorinv linalg.tensorsolve log_normal logdet lu lu_solve lu_unpack mH matrix_exp
    meshgrid.list_of_tensors meshgrid.variadic_tensors msort mvlgamma.mvlgamma_p_1
    mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5 nanquantile narrow_copy native_batch_norm
    native_dropout_backward native_group_norm native_layer_norm new_empty_strided nextafter
    nn.functional.cosine_embedding_loss nn.functional.feature_alpha_dropout.without_train
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.hinge_embedding_loss nn.functional.max_unpool2d
    nn.functional.max_unpool2d.grad nn.functional.max_unpool3d nn.functional.max_unpool3d.grad
    nn.functional.pad.replicate_negative nn.functional.pdist nn.functional.poisson_nll_loss
    nonzero nonzero_static norm.nuc normal.in_place ormqr permute_copy pinverse
    polygamma.polygamma_n_0 polygamma.polygamma_n_1 polygamma.polygamma_n_2
    polygamma.polygamma_n_3 polygamma.polygamma_n_4 positive put qr quantile rand_like
    randint_like randn_like real renorm resolve_conj resolve_neg rot90 select_scatter slice
    special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1
    special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v
    special.chebyshev_polynomial_w special.erfcx special.hermite_polynomial_h
    special.hermite_polynomial_he special.i0e special.i1 special.i1e
    special.laguerre_polynomial_l special.legendre_polynomial_p special.modified_bessel_i0
    special.modified_bessel_i1 special.modified_bessel_k0 special.modified_bessel_k1
    special.ndtri special.polygamma.special_polygamma_n_0 special.scaled_modified_bessel_k0
    special.scaled_modified_bessel_k1 special.shifted_chebyshev_polynomial_t
    special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v
    special.shifted_chebyshev_polynomial_w special.spherical_bessel_j0 special.zeta
    split_with_sizes_copy squeeze_copy sum_to_size svd t_copy take to_sparse
    torch.ops.aten._safe_softmax.default trace transpose_copy triangular_solve unbind_copy
    unfold_copy uniform unique unique_consecutive unsqueeze_copy view_copy
    """,
    # Running statistics of the batch; samples of one row; products of rows by rows.
    WHOLE: """
    histc
    nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
        """,
}

#: op: why it is whole
VERDICTS = {name: why for why, names in _NAMES.items() for name in names.split()}
