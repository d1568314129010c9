// Kernels of the k-quants and of IQ4_XS: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_kquants.cuh"

IK_WEIGHT_KERNELS(q2_K, Q2_K)
IK_WEIGHT_KERNELS(q3_K, Q3_K)
IK_WEIGHT_KERNELS(q4_K, Q4_K)
IK_WEIGHT_KERNELS(q5_K, Q5_K)
IK_WEIGHT_KERNELS(q6_K, Q6_K)
IK_WEIGHT_KERNELS(iq4_xs, IQ4_XS)
