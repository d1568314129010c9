// Weight rows as they are in a file become device rows (upload.py): every field of the blocks of a row becomes a plane.
// Bytes in and out once each; at most a fifth of memory speed is needed to keep up with the bus they come over.
#include "common.cuh"

// n_rows rows of in_row bytes: a header of `header` bytes, then n_blocks blocks of `block` bytes. Plane i has bytes
// offset_i .. +size_i of every block (five times 12 bits in offsets and sizes; size 0: no plane), padded with zeros to
// 16 bytes. At the end the first `scale` bytes of the header, padded likewise, as a float times `factor` unless it is 1.
// One thread per 4 bytes of out.
extern "C" __global__ void __launch_bounds__(256)
upload_rows(const u8* in, u8* out, i64 n_rows, i64 in_row, i64 out_row, int header, int block, int n_blocks, i64 offsets,
            i64 sizes, int scale, float factor) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x, words = out_row >> 2;
  const i64 row = i / words;
  if (row >= n_rows) return;
  int p = (int)(i - row * words) * 4;
  u32* target = (u32*)(out + row * out_row + p);
  const u8* source = in + row * in_row;
  for (int plane = 0; plane < 5; plane++) {
    const int size = (int)(sizes >> 12 * plane) & 0xfff, n = n_blocks * size, padded = (n + 15) & ~15;
    if (p >= padded) {
      p -= padded;
      continue;
    }
    const u8* field = source + header + ((int)(offsets >> 12 * plane) & 0xfff);
    u32 v = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int q = p + j;
      if (q < n) v |= (u32)field[(i64)(q / size) * block + q % size] << 8 * j;
    }
    *target = v;
    return;
  }
  u32 v = 0;
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (p + j < scale) v |= (u32)source[p + j] << 8 * j;
  if (factor != 1.f && p == 0) v = __float_as_uint(__uint_as_float(v) * factor);
  *target = v;
}
