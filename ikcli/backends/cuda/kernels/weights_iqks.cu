// Kernels of the IQ*_KS, KSS and KL types: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_iqk.cuh"

IK_WEIGHT_KERNELS(iq2_ks, IQ2_KS)
IK_WEIGHT_KERNELS(iq3_ks, IQ3_KS)
IK_WEIGHT_KERNELS(iq4_ks, IQ4_KS)
IK_WEIGHT_KERNELS(iq5_ks, IQ5_KS)
IK_WEIGHT_KERNELS(iq4_kss, IQ4_KSS)
IK_WEIGHT_KERNELS(iq2_kl, IQ2_KL)
