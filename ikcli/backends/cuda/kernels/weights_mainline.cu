// Kernels of the formats of llama.cpp alone: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_mainline.cuh"

IK_WEIGHT_KERNELS(tq1_0, TQ1_0)
IK_WEIGHT_KERNELS(tq2_0, TQ2_0)
IK_WEIGHT_KERNELS(q1_0_g128, Q1_0_G128)
IK_WEIGHT_KERNELS(q2_0, Q2_0)
IK_WEIGHT_KERNELS(nvfp4, NVFP4)
