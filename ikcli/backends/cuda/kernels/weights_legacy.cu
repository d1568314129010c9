// Kernels of the formats of 32 columns and of one byte per column: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_legacy.cuh"

IK_WEIGHT_KERNELS(q4_0, Q4_0)
IK_WEIGHT_KERNELS(q4_1, Q4_1)
IK_WEIGHT_KERNELS(q5_0, Q5_0)
IK_WEIGHT_KERNELS(q5_1, Q5_1)
IK_WEIGHT_KERNELS(q6_0, Q6_0)
IK_WEIGHT_KERNELS(q8_0, Q8_0)
IK_WEIGHT_KERNELS(iq4_nl, IQ4_NL)
IK_WEIGHT_KERNELS(mxfp4, MXFP4)
IK_WEIGHT_KERNELS(q8_KV, Q8_KV)
IK_WEIGHT_KERNELS(q8_K, Q8_K)
