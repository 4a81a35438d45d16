"""Kernels are told apart by name."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from foretrace.trace.classify import Classifier, CollectiveKind, KernelKind, _needed_text

COMMUNICATION = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "broadcast",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": "unknown",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "unknown",
    "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs4K)": "all_reduce",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclKernel_AllReduce": "all_reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "rcclKernel_AllGather": "all_gather",
    "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": "unknown",
    "void mscclpp::collective::allreduceAllPairs<(mscclpp::ReduceOp)0, __half>(__half*)": "all_reduce",
    "oneccl_allreduce_pcie<sycl::_V1::ext::oneapi::bfloat16>": "all_reduce",
    "hcom_allReduce__123_0_1": "all_reduce",
    "HcclAllGather": "all_gather",
    "void nvshmemi_alltoall_kernel<int>(int, int*, int*, unsigned long)": "all_to_all",
    "void dpsk::ep::internode::dispatch<false, 8, false, 8191, 7>(int4*, float*, long*)": "all_to_all",
    "void dpsk::ep::internode::combine<8, true, false, __nv_bfloat16, 8>(int4*)": "all_to_all",
    "void dpsk::ep::internode::cached_notify<false>(int, int, int)": "all_to_all",
    "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, int*)": "all_to_all",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)": "all_to_all",
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, float*)": "all_to_all",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "all_reduce",
    "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 8>(float*, float*)": "all_reduce",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>(float**, float*)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)": "all_reduce",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 4>(aiter::RankData*)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>(__half*)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true>(AllReduceParams)": "all_reduce",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<(int)1>(P)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(int)1>(P)": "all_reduce",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs(int, int, int, int, void**)": "reduce_scatter",
    "userbuffers_fp16_sum_inplace_gpu_rr_ag(int, int, int, int, void**)": "all_gather",
    "void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int, int, void**)": "all_reduce",
    "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)": "send",
    "kuserbuffers_pushrecv(int, int, int*, int*, int, int*)": "recv",
    "gloo:all_reduce": "all_reduce",
    "gloo:broadcast": "broadcast",
    "nccl:all_reduce": "all_reduce",
    "nccl:_all_gather_base": "all_gather",
    "nccl:reduce_scatter_tensor_coalesced": "reduce_scatter",
    "nccl:send 0->1": "send",
    "nccl:recv 0<-1": "recv",
    "nccl:coalesced": "unknown",
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::barrier": "barrier",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
}

# Words of communication in the names of kernels that never leave the device.
FALSE_FRIENDS = {
    "void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*, long*, int>::Policy, long*>(long*)": "sort",
    "_combined_routing_compute": "routing",
    "_combined_routing_memset": "routing",
    "void dpsk::ep::cuda::get_dispatch_layout<384, 8>(int const*, int*)": "routing",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)": "routing",
    "groupnorm_kernel_dispatch_up": "normalization",
    "groupnorm_kernel_dispatch_down": "normalization",
    "void at::native::elementwise_kernel_manual_unroll<128, 8, at::native::broadcast_impl>(int)": "elementwise",
    "void broadcast_elementwise_kernel<float>(float*)": "elementwise",
    "kernel_dispatch": "other",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>>>(int)": "reduction",
    "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKParams<float>)": "gemm",
    "void block_reduce<float, 256>(float*)": "reduction",
    "void blockAllReduceSum_softmax<float>(float*)": "softmax",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4, at::native::ReduceAdd>(int)": "indexing",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)": "indexing",
    "small_gather": "indexing",
    "void at::native::index_elementwise_kernel<128, 4, at::native::index_put_kernel_impl<int>>(int)": "indexing",
    "device_barrier_probe": "other",
    "void c10d::checkForNaN<float>(float*, unsigned long)": "other",
    "triton_poi_fused_add_all_reduce_wait_tensor_3": "elementwise",
    "Memcpy PtoP (Device -> Device)": "memory",
}

COMPUTE = {
    "gemm": [
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn",
        "volta_sgemm_128x64_nn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_128x128_32x5_tn_align8>(P)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>(P)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1",
        "nvjet_tst_192x8_64x8_4x1_v_bz_TNT",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(P)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(P)",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_dynBatch_sm100f",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu",
        "fused_moe_kernel",
        "triton_tem_fused_mm_4",
        "triton_tem_fused_addmm_relu_0",
    ],
    "convolution": [
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_cudnn_infer",
        "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int)",
        "void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, false, true, true>(int)",
        "volta_scudnn_128x64_relu_medium_nn_v1",
        "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x128_32x3_nhwc>(P)",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt64x128x32_wt32x32x8",
        "MIOpenConvUniC.kd",
        "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm",
        "triton_tem_fused_convolution_1",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(P)",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(P)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<cutlass::gemm::X>>>(P)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "attn_fwd",
        "bwd_kernel_fused_attn_dk_dv",
        "void vllm::paged_attention_v2_kernel<__half, __half, 128, 16>(float*)",
        "aiter::fmha_fwd_hd128_bf16_causal",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_41BlockFmhaPipelineQRKSVS",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1",
        "triton_tem_fused_flex_attention_0",
    ],
    "normalization": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
        "void cuApplyLayerNorm<c10::Half, float, c10::Half>(c10::Half*)",
        "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)",
        "void cudnn::bn_bw_1C11_singleread<float, 512, true, 1, 2, 0>(P)",
        "MIOpenBatchNormFwdTrainSpatial",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long)",
        "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
        "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(int)>(int)",
        "triton_poi_fused_native_layer_norm_mul_silu_2",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, "
        "at::native::(anonymous namespace)::BinaryOpListAlphaFunctor<float, 2, 2, 0>>(T)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>(c10::BFloat16*)",
    ],
    "reduction": ["triton_red_fused_add_mean_0", "triton_per_fused__softmax_1"],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*)",
    ],
    "loss": ["void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)"],
    "embedding": [
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>(P)",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, long>(long*)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int>(T)",
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(T)",
        "void multi_tensor_apply_kernel<TensorListMetadata<3>, SGDFunctor<3, float, float>>(int)",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, LAMBStage1Functor<float>>(int)",
        "fused_adamw_kernel",
    ],
    "memory": [
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "CopyDeviceToDevice",
        "__amd_rocclr_copyBuffer",
        "__amd_rocclr_fillBufferAligned",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>(float*)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(P)",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(P)",
        "batched_transpose_32x32_half",
    ],
    "sort": [
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>(int*)",
        "void cub::DeviceScanKernel<cub::AgentScanPolicy<128, 15, int>>(P)",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(T)",
        "void fbgemm_gpu::_offsets_range_cuda_kernel<int>(long, long, int const*, int*)",
    ],
    "quantization": ["void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float const*)"],
    "pooling": ["void at::native::(anonymous namespace)::max_pool_forward_nchw<float>(int)"],
    "random": ["void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(int)"],
    "other": ["", "(", "my_kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)"],
}


@pytest.mark.parametrize(("name", "collective"), COMMUNICATION.items())
def test_communication_and_its_collective(name: str, collective: str) -> None:
    classifier = Classifier.default()
    assert classifier.kernel_kind(name) is KernelKind.COMMUNICATION
    assert classifier.is_communication(name)
    assert classifier.collective_kind(name).label == collective


@pytest.mark.parametrize(("name", "kind"), FALSE_FRIENDS.items())
def test_a_word_of_communication_does_not_make_it_communication(name: str, kind: str) -> None:
    classifier = Classifier.default()
    assert not classifier.is_communication(name)
    assert classifier.kernel_kind(name).label == kind
    assert classifier.collective_kind(name) is CollectiveKind.NONE


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in COMPUTE.items() for name in names])
def test_kind_of_compute(kind: str, name: str) -> None:
    assert Classifier.default().kernel_kind(name).label == kind


@pytest.mark.parametrize(
    ("argument", "collective"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_all", "all_to_all"),
        ("all_to_allv", "all_to_all"),
        ("broadcast", "broadcast"),
        ("_broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("send", "send"),
        ("recv", "recv"),
        ("barrier", "barrier"),
        ("coalesced", "unknown"),
        ("something_new", "unknown"),
    ],
)
def test_the_argument_is_believed_before_the_name(argument: str, collective: str) -> None:
    classifier = Classifier.default()
    assert (
        classifier.collective_kind("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", argument).label
        == collective
    )
    assert classifier.collective_kind("record_param_comms", argument).label == collective
    told_by_name = "send_recv" if collective == "unknown" else collective
    assert (
        classifier.collective_kind("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", argument).label
        == told_by_name
    )


def test_kinds_of_many_names() -> None:
    names = [name for names in COMPUTE.values() for name in names]
    kinds = Classifier.default().kernel_kinds([*names, *names])
    assert kinds.dtype == np.int8
    assert [KernelKind(kind).label for kind in kinds.tolist()] == 2 * [k for k, n in COMPUTE.items() for _ in n]
    assert Classifier.default().kernel_kinds([]).shape == (0,)


def test_default_is_one_object_and_survives_a_process_pool() -> None:
    assert Classifier.default() is Classifier.default()
    copy = pickle.loads(pickle.dumps(Classifier.default()))
    assert copy.kernel_kind("attn_fwd") is KernelKind.ATTENTION


def test_the_module_imports_the_standard_library_only() -> None:
    module = sys.modules[Classifier.__module__].__file__
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print(sorted({'numpy', 'yaml', 'pyarrow', 'foretrace'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(module)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_users_table_comes_first(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "rules:\n"
        "  - kind: communication\n"
        "    any: ['^Acme_Xchg', '\\Wshuffle\\b']\n"
        "    collective: all_to_all\n"
        "    note: ours\n"
        "  - kind: communication\n"
        "    any: [acme_reduce_scatter]\n"
        "  - {kind: attention, any: ['(g)em(m)\\1_qk']}\n",
    )
    mine = Classifier.from_yaml(path)
    assert mine.collective_kind("void acme_xchg<float>(int)") is CollectiveKind.ALL_TO_ALL
    assert mine.collective_kind("acme::shuffle(int)") is CollectiveKind.ALL_TO_ALL
    assert mine.collective_kind("Acme_Reduce_Scatter") is CollectiveKind.REDUCE_SCATTER
    assert mine.kernel_kind("gemmg_qk") is KernelKind.ATTENTION
    assert mine.kernel_kind("volta_sgemm_32x32_nn") is KernelKind.GEMM
    alone = Classifier.from_yaml(path, extend=False)
    assert alone.kernel_kind("volta_sgemm_32x32_nn") is KernelKind.OTHER
    assert Classifier.default().kernel_kind("acme_xchg") is KernelKind.OTHER


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rules: [", "not readable as YAML"),
        ("", "expected one key 'rules'"),
        ("rules: []\nmore: 1", "expected one key 'rules'"),
        ("- kind: gemm", "expected one key 'rules'"),
        ("rules: [gemm]", r"rule 1: 'gemm' is no rule"),
        (
            "rules: [{kind: gemm, any: [x]}, {kind: gem, any: [x]}]",
            r"rule 2 .*'gem' does not exist; take one of other, comm",
        ),
        ("rules: [{any: [x]}]", "None does not exist"),
        ("rules: [{kind: gemm, all: [x]}]", r"unknown key 'all'; a rule has 'kind', 'any'"),
        ("rules: [{kind: gemm, any: x}]", "must be a list"),
        ("rules: [{kind: gemm, any: []}]", "must be a list"),
        ("rules: [{kind: gemm, any: [1]}]", "must be a list"),
        (
            "rules: [{kind: gemm, any: ['a(b']}]",
            r"rule 1 \(kind 'gemm'\): pattern 'a\(b' is no regular expression.*backslash",
        ),
        ("rules: [{kind: gemm, any: ['(?i)ab']}]", "is no regular expression"),
        ("rules: [{kind: gemm, any: [x], collective: all_reduce}]", "goes with kind communication"),
        ("rules: [{kind: communication, any: [x], collective: all}]", "take one of none, all_reduce"),
    ],
)
def test_a_faulty_table_is_named_with_the_remedy(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=f"(?s)^{re.escape(str(path))}.*{says}"):
        Classifier.from_yaml(path)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("abc", "abc"),
        ("ab?c", "a"),
        ("abcd*ef", "abc"),
        ("ab+cde", "cde"),
        ("abc{2}d", "ab"),
        ("ab|c", ""),
        ("(?:ab|c)de", "de"),
        ("[abc]d", "d"),
        ("[]x]ab", "ab"),
        (r"\bab\d", "ab"),
        ("^ab$", "ab"),
        ("nccl(?<![a-z]nccl)", "nccl"),
        ("(abc)?", ""),
        ("a.b", "a"),
    ],
)
def test_text_that_a_pattern_needs(pattern: str, text: str) -> None:
    assert _needed_text(pattern) == text


# The communication kernels of all recorded traces, as a person told them apart.
RECORDED = re.compile(
    r"nccl(?:Dev)?Kernel_|void \(anonymous namespace\)::multimem_all_reduce_kernel<"
    r"|void dpsk::ep::internode::(?:dispatch|combine|cached_notify|notify_dispatch)<"
)


@pytest.fixture(scope="module")
def recorded(shared: Path) -> dict[str, Counter[str]]:
    """Device time of each kernel and copy in each recorded trace."""
    traces = {}
    for path in sorted((shared / "traces").rglob("*.json.gz")):
        try:
            document = json.loads(gzip.decompress(path.read_bytes()), strict=False)
        except ValueError:
            continue
        times: Counter[str] = Counter()
        for event in document.get("traceEvents", ()):
            if str(event.get("cat", "")).lower() in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"):
                times[event["name"]] += float(event.get("dur") or 0)
        if times:
            traces[str(path.relative_to(shared / "traces"))] = times
    assert len(traces) > 30
    return traces


@pytest.mark.slow
def test_communication_in_recorded_traces(recorded: dict[str, Counter[str]]) -> None:
    names = sorted(set().union(*recorded.values()))
    assert len(names) > 600
    found = {name for name in names if Classifier.default().is_communication(name)}
    assert found == {name for name in names if RECORDED.match(name)}
    assert len(found) >= 11


@pytest.mark.slow
def test_little_time_of_recorded_traces_is_other(recorded: dict[str, Counter[str]]) -> None:
    classifier = Classifier.default()
    for trace, times in recorded.items():
        other = {name: time for name, time in times.items() if classifier.kernel_kind(name) is KernelKind.OTHER}
        other.pop("at::cuda::(anonymous namespace)::spin_kernel(long)", None)  # waits, in a test of PyTorch
        assert sum(other.values()) <= 0.005 * sum(times.values()), (trace, other)


def test_agrees_with_tracelens(shared: Path) -> None:
    kinds = {"GEMM": "gemm", "elementwise": "elementwise", "NORM_fwd": "normalization", "reduce": "reduction"}
    classifier = Classifier.default()
    seen = Counter[str]()
    for path in sorted((shared / "reference" / "tracelens").glob("*/kernel_summary.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                category, kind = row["Parent op category"], classifier.kernel_kind(row["Kernel name"]).label
                if category in kinds:
                    assert kind == kinds[category], row
                    seen[kind] += 1
                elif category:
                    assert kind not in kinds.values() or row["Parent cpu_op"] == "aten::arange", row
                    assert (kind == "attention") == ("flash_attention" in row["Parent cpu_op"]), row
    assert set(seen) == set(kinds.values())
