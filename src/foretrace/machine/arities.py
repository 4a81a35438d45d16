"""How many arguments an operator may have been called with.

TorchScript's interpreter records its whole stack: the operator's own arguments are then the last ones. A call with more
arguments than any overload takes is such a one.
"""

from __future__ import annotations

from functools import cache

# Arguments of each overload that returns its result, a stroke, arguments of the longest overload (with ``out=``).
_TABLE = """
1/1: _local_scalar_dense isfinite item positive relu6 selu
1/2: _foreach_abs _foreach_acos _foreach_asin _foreach_atan _foreach_ceil _foreach_cos _foreach_cosh _foreach_erf
  _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac _foreach_lgamma _foreach_log _foreach_log10
  _foreach_log1p _foreach_log2 _foreach_neg _foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid
  _foreach_sign _foreach_sin _foreach_sinh _foreach_sqrt _foreach_tan _foreach_tanh _foreach_trunc _foreach_zero abs
  acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac
  hardsigmoid hardswish hstack isinf isnan isneginf isposinf lgamma log log10 log1p log2 log_sigmoid logical_not mish
  neg rad2deg reciprocal relu rsqrt sgn sigmoid sign signbit silu sin sinh special_erf sqrt square tan tanh trunc
  vstack zero
1,2/3: round
1,2,3/5: max min
1,3/4: all any where
2/2: __and__ __or__ __xor__ _prelu_kernel contiguous mish_backward pin_memory prelu reshape tile
2/3: _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
  _foreach_clamp_max _foreach_clamp_min _foreach_div _foreach_maximum _foreach_minimum _foreach_mul _foreach_pow
  _int_mm _pin_memory adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d atan2 bitwise_and bitwise_left_shift
  bitwise_or bitwise_right_shift bitwise_xor cat celu clamp_max clamp_min clone concat copysign count_nonzero dot eq
  fill flip floor_divide fmax fmin fmod ge gelu ger gt hardsigmoid_backward hardswish_backward hypot index le
  leaky_relu logical_and logical_or logical_xor logit lt matmul maximum minimum mul mv ne outer pow remainder repeat
  sigmoid_backward silu_backward stack take tanh_backward tril triu true_divide vdot xlogy
2,3/4: _foreach_add _foreach_sub bernoulli bmm copy div mm
2,3,4/5: random
2,3,4,5/6: norm
2,4/5: mean prod std sum var
2,4/6: std_mean var_mean
3/3: _safe_softmax dropout flatten l1_loss
3/4: _foreach_copy _foreach_lerp _foreach_norm _log_softmax _softmax add amax amin argmax argmin clamp clip
  constant_pad_nd cumprod cumsum exponential gelu_backward geometric hardtanh index_select lerp linear
  log_sigmoid_backward log_softmax logit_backward logsumexp masked_fill mse_loss native_dropout_backward roll rot90
  rsub softmax softplus sub threshold threshold_backward
3/5: native_dropout
3,4/5: normal
3,4,5,6,8/8: to
4/4: _fused_rms_norm kl_div rms_norm
4/5: _foreach_addcdiv _foreach_addcmul _log_softmax_backward_data _softmax_backward_data addcdiv addcmul
  binary_cross_entropy cauchy elu gather hardtanh_backward huber_loss index_copy index_fill index_put
  leaky_relu_backward log_normal mse_loss_backward nan_to_num nanmean nansum scatter_add select_backward
  smooth_l1_loss softplus_backward uniform
4,5/6: scatter
5/5: _grouped_mm isclose nll_loss_nd ones zeros
5/6: _index_put_impl addbmm addmv addr binary_cross_entropy_backward binary_cross_entropy_with_logits embedding
  embedding_dense_backward huber_loss_backward index_add linalg_vector_norm nll_loss nll_loss2d
  smooth_l1_loss_backward
5/7: nll_loss2d_forward nll_loss_forward
5/8: native_layer_norm
5,6/6: rand randn
5,6/7: addmm baddbmm
6/6: _fused_rms_norm_backward cross_entropy_loss full group_norm layer_norm max_pool1d max_pool2d max_pool3d ones_like
  zeros_like
6/7: _addmm_activation avg_pool1d elu_backward slice_backward
6/8: max_pool2d_with_indices max_pool3d_with_indices
6,7/7: rand_like randn_like
6,8/11: _native_batch_norm_legit
7/7: _scaled_dot_product_flash_attention_for_cpu _to_copy conv1d conv2d conv3d full_like
7/8: avg_pool2d avg_pool3d cudnn_convolution_relu mkldnn_convolution nll_loss2d_backward nll_loss_backward
7/11: _batch_norm_with_update
7,10/10: _scaled_dot_product_flash_attention
8/8: _scaled_dot_product_efficient_attention _scaled_dot_product_fused_attention_overrideable conv_transpose1d
  conv_transpose2d conv_transpose3d scaled_dot_product_attention
8/9: _scaled_mm avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward
  max_pool3d_with_indices_backward
8/11: miopen_batch_norm miopen_batch_norm_backward native_batch_norm native_group_norm native_layer_norm_backward
8/12: cudnn_batch_norm
8,9/9: embedding_bag
9/9: _batch_norm_impl_index _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention _scaled_grouped_mm
  batch_norm
9/10: convolution convolution_overrideable cudnn_convolution miopen_convolution miopen_depthwise_convolution
9/12: cudnn_batch_norm_backward
9/13: _embedding_bag _embedding_bag_forward_only
10/10: _scaled_dot_product_flash_attention_for_cpu_backward
10/11: cudnn_convolution_transpose
10/13: convolution_backward_overrideable native_batch_norm_backward native_group_norm_backward
11/12: _fused_adagrad
11/14: convolution_backward
12/13: _fused_sgd
12,13/14: _convolution
13/13: _scaled_dot_product_efficient_attention_backward
14/14: _efficient_attention_forward
15/15: _scaled_dot_product_flash_attention_backward
15/16: _fused_adam _fused_adamw
16/16: _scaled_dot_product_cudnn_attention_backward
17/17: _flash_attention_backward
17,18/18: _flash_attention_forward
20/20: _efficient_attention_backward
"""


@cache
def arities() -> dict[str, tuple[tuple[int, ...], int]]:
    """For each operator, by the name of its formula: arguments of its overloads, and the most it can have."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for line in _TABLE.replace("\n  ", " ").strip().splitlines():
        counts, names = line.split(": ")
        own, most = counts.split("/")
        found |= dict.fromkeys(names.split(), (tuple(map(int, own.split(","))), int(most)))
    return found
