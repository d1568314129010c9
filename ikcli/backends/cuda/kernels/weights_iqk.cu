// Kernels of the IQ*_K types: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_iqk.cuh"

IK_WEIGHT_KERNELS(iq2_k, IQ2_K)
IK_WEIGHT_KERNELS(iq3_k, IQ3_K)
IK_WEIGHT_KERNELS(iq4_k, IQ4_K)
IK_WEIGHT_KERNELS(iq5_k, IQ5_K)
IK_WEIGHT_KERNELS(iq6_k, IQ6_K)
