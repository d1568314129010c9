// Kernels of the trellis and ternary types: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_trellis.cuh"

template <> constexpr int ONE_BLOCKS<IQ3_KT> = 5;
IK_WEIGHT_KERNELS(iq1_kt, IQ1_KT)
IK_WEIGHT_KERNELS(iq2_kt, IQ2_KT)
IK_WEIGHT_KERNELS(iq3_kt, IQ3_KT)
IK_WEIGHT_KERNELS(iq4_kt, IQ4_KT)
IK_WEIGHT_KERNELS(iq1_bn, IQ1_BN)
IK_WEIGHT_KERNELS(iq2_bn, IQ2_BN)
