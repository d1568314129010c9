// Kernels of the grid types: mv_*, mm_*, embed_*.
#include "weights_gemm.cuh"
#include "weights_iquants.cuh"

template <> constexpr int ONE_BLOCKS<IQ3_S> = 7;
IK_WEIGHT_KERNELS(iq1_s, IQ1_S)
IK_WEIGHT_KERNELS(iq1_m, IQ1_M)
IK_WEIGHT_KERNELS(iq1_s_r, IQ1_S_R)
IK_WEIGHT_KERNELS(iq1_m_r, IQ1_M_R)
IK_WEIGHT_KERNELS(iq2_xxs, IQ2_XXS)
IK_WEIGHT_KERNELS(iq2_xs, IQ2_XS)
IK_WEIGHT_KERNELS(iq2_s, IQ2_S)
IK_WEIGHT_KERNELS(iq3_xxs, IQ3_XXS)
IK_WEIGHT_KERNELS(iq3_s, IQ3_S)
