// Thin device primitives: PTX on the GPU, lane-exact emulation on the CPU (emu.h, under IK_EMU).
//
// Kernels are header-free and reach the hardware only through what is declared here and through the CUDA built-ins that
// emu.h also has: threadIdx.x/blockIdx/blockDim.x/gridDim, __syncthreads, __syncwarp, __float_as_int and its kin,
// __popc/__clz/__ffs, sqrtf/rsqrtf/expf/__expf/tanhf/fmaf/fmaxf/..., min/max of equal types, int atomicAdd.
#pragma once
#ifdef IK_EMU
#include "emu.h"
#else
typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DI __device__ __forceinline__
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
// Dynamic shared memory as `u8* smem_raw`; a static array as `IK_SHARED(float, name, 32)`.
#define SMEM_DECL extern __shared__ __align__(1024) u8 smem_raw[];
#define IK_SHARED(type, name, count) __shared__ type name[count];

DI u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The first n threads of the block that name barrier id (1..15); n is a multiple of 32.
DI void bar_sync(int id, int n) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(n) : "memory"); }
DI void warp_sync() { __syncwarp(); }

// Asynchronous copies global -> shared; without pred the target is zero-filled and src is not read (but must be valid).
DI void cp16(void* dst, const void* src, bool pred) {
  int n = pred ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(smem_addr(dst)), "l"(src), "r"(n) : "memory");
}
DI void cp8(void* dst, const void* src, bool pred) {
  int n = pred ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0],[%1],8,%2;" ::"r"(smem_addr(dst)), "l"(src), "r"(n) : "memory");
}
DI void cp4(void* dst, const void* src, bool pred) {
  int n = pred ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(smem_addr(dst)), "l"(src), "r"(n) : "memory");
}
DI void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DI void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// 8x8 matrices of 16-bit elements: lane 8*m+r passes the address of row r of matrix m.
DI void ldsm4(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem_addr(p)) : "memory");
}
DI void ldsm4t(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem_addr(p)) : "memory");
}
DI void ldsm2(u32 (&r)[2], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(smem_addr(p)) : "memory");
}
DI void ldsm2t(u32 (&r)[2], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(smem_addr(p)) : "memory");
}

// Conversions, round to nearest even; pack2<BF>: two f32 -> bf16x2 (BF) or f16x2, lo in the low half.
DI float f16f(u16 h) {
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h));
  return f;
}
DI u16 f2h(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(f));
  return h;
}
DI float bf16f(u16 h) { return __uint_as_float((u32)h << 16); }
DI u16 f2b(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(f));
  return h;
}
template <bool BF> DI u32 pack2(float lo, float hi) {
  u32 r;
  if constexpr (BF) asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DI float2 unpack_f16(u32 v) { return make_float2(f16f((u16)v), f16f((u16)(v >> 16))); }
DI float2 unpack_bf16(u32 v) { return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)); }

// Tensor cores: C (16x8, f32 or i32) += A (16x16 f16/bf16, or 16x32 i8) * B.
template <bool BF> DI void mma16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (BF)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DI void mma16832(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// C (16x8, i32) = zero + A (16x32 i8) * B: a quad of constants saves four moves per product.
DI void mma16832(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const int4& zero) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
               : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(zero.x), "r"(zero.y), "r"(zero.z), "r"(zero.w));
}
// C (16x8, i32) = zero + A (16x16 i8) * B: a half of the above, with a[0], a[1], b0 (or a[2], a[3], b1) of it.
DI void mma16816i(int (&c)[4], u32 a0, u32 a1, u32 b, const int4& zero) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
               : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
               : "r"(a0), "r"(a1), "r"(b), "r"(zero.x), "r"(zero.y), "r"(zero.z), "r"(zero.w));
}
// C (16x8, f32) += A (16x8 tf32) * B; tf32 is f32 with 10 bits of fraction, rounded to nearest, ties away from zero.
DI void mma1688(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DI u32 tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0,%1;" : "=r"(r) : "f"(x));
  return r;
}

// Fast mathematics: 2^x and log2(x) flush denormals.
DI float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DI float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DI float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DI float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// Exchange inside a warp; all 32 lanes must take part. shx: with lane ^ m; shfl: from one lane; shup: from lane - d.
DI u32 shx_u32(u32 v, int m) { return __shfl_xor_sync(0xffffffffu, v, m); }
DI float shx(float v, int m) { return __shfl_xor_sync(0xffffffffu, v, m); }
DI u32 shfl_u32(u32 v, int from) { return __shfl_sync(0xffffffffu, v, from); }
DI float shfl(float v, int from) { return __shfl_sync(0xffffffffu, v, from); }
DI u32 shup_u32(u32 v, int d) { return __shfl_up_sync(0xffffffffu, v, d); }
DI u32 ballot(bool p) { return __ballot_sync(0xffffffffu, p); }

// Bytes and pairs of f16.
DI u32 prmt(u32 a, u32 b, u32 s) { return __byte_perm(a, b, s); }
DI u32 hadd2(u32 a, u32 b) {
  u32 r;
  asm("add.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DI u32 hsub2(u32 a, u32 b) {
  u32 r;
  asm("sub.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DI u32 hmul2(u32 a, u32 b) {
  u32 r;
  asm("mul.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DI u32 hfma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DI int dp4a(u32 a, u32 b, int c) { return __dp4a((int)a, (int)b, c); }  // both signed
DI int dp4a_us(u32 a, u32 b, int c) {                                   // a unsigned, b signed
  int r;
  asm("dp4a.u32.s32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DI u32 vsub4(u32 a, u32 b) { return __vsub4(a, b); }  // byte by byte, wrapping

// A value that the compiler may not compute again later: without it, decoding sinks into every block that uses its result.
DI void pin(u32& v) { asm volatile("" : "+r"(v)); }
DI void pin(int4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }
DI void pin(float& v) { asm volatile("" : "+f"(v)); }

// Loads of data that is read once (weights): past L1, aligned to their size.
DI uint4 ldg16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DI uint2 ldg8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DI u32 ldg4(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
DI u16 ldg2(const void* p) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0,[%1];" : "=h"(v) : "l"(p));
  return v;
}
#endif
