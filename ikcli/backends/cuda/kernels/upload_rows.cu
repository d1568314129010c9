// Weight rows as they are in a file become device rows (upload.py): every field of the blocks of a row becomes a plane.
// Bytes in and out once each; at most a fifth of memory speed is needed to keep up with the bus they come over.
#include "common.cuh"

// The bytes of a row of a plain type, after its header.
struct PlainBody {
  const u8* bytes;
};
DI u32 byte_at(const PlainBody& body, int at) { return body.bytes[at]; }

// The bytes that a row of an interleaved type would have in its plain type. A group of `rows` rows is stored as units of
// rows * unit bytes. Byte j of the plain unit of row r is the XOR of up to n_terms bytes of the stored unit, shifted and
// masked: bits 0..15 of a term are the source byte, 16..23 the left shift plus 8, 24..31 the mask; shift 0 makes the mask
// itself the value, and 0 ends the list. Terms of neighbouring bytes lie side by side, because neighbouring lanes need
// them together. XOR instead of OR also undoes sign codes, whose bits depend on the bit below.
struct GroupedBody {
  const u8* units;
  const u32* terms;  // of this row
  int n_terms, rows, unit;
};
DI u32 byte_at(const GroupedBody& body, int at) {
  const int u = at / body.unit, j = at - u * body.unit, stored = body.rows * body.unit;
  const u8* source = body.units + (i64)u * stored;
  u32 v = 0;
  for (int t = 0; t < body.n_terms; t++) {
    const u32 term = body.terms[t * stored + j];
    if (term == 0) break;
    const int shift = (int)(term >> 16 & 0xff);
    v ^= shift ? (u32)source[term & 0xffff] << shift >> 8 & term >> 24 : term >> 24;
  }
  return v;
}

// The word at byte p of a device row. Plane i has bytes offset_i .. +size_i of every block (five times 12 bits in offsets
// and sizes; size 0: no plane), padded with zeros to 16 bytes. At the end the first `scale` bytes of the header, padded
// likewise, as a float times `factor` unless it is 1.
template <class Body>
DI u32 device_word(const Body& body, const u8* header, int p, int block, int n_blocks, i64 offsets, i64 sizes, int scale,
                   float factor) {
  u32 v = 0;
  for (int plane = 0; plane < 5; plane++) {
    const int size = (int)(sizes >> 12 * plane) & 0xfff, n = n_blocks * size, padded = (n + 15) & ~15;
    if (p >= padded) {
      p -= padded;
      continue;
    }
    const int field = (int)(offsets >> 12 * plane) & 0xfff;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int q = p + j;
      if (q < n) v |= byte_at(body, field + q / size * block + q % size) << 8 * j;
    }
    return v;
  }
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (p + j < scale) v |= (u32)header[p + j] << 8 * j;
  return factor != 1.f && p == 0 ? __float_as_uint(__uint_as_float(v) * factor) : v;
}

// n_rows rows of in_row bytes: a header of `header` bytes, then n_blocks blocks of `block` bytes. One thread per 4 bytes
// of out.
extern "C" __global__ void __launch_bounds__(256)
upload_rows(const u8* in, u8* out, i64 n_rows, i64 in_row, i64 out_row, int header, int block, int n_blocks, i64 offsets,
            i64 sizes, int scale, float factor) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x, words = out_row >> 2;
  const i64 row = i / words;
  if (row >= n_rows) return;
  const int p = (int)(i - row * words) * 4;
  const u8* source = in + row * in_row;
  const PlainBody body{source + header};
  *(u32*)(out + row * out_row + p) = device_word(body, source, p, block, n_blocks, offsets, sizes, scale, factor);
}

// The same for groups of `rows` rows of in_row bytes each: the headers of all rows, then the units (GroupedBody).
extern "C" __global__ void __launch_bounds__(256)
upload_groups(const u8* in, u8* out, i64 n_rows, i64 in_row, i64 out_row, int header, int block, int n_blocks,
              i64 offsets, i64 sizes, int scale, float factor, const u32* terms, int n_terms, int rows, int unit) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x, words = out_row >> 2;
  const i64 row = i / words;
  if (row >= n_rows) return;
  const int p = (int)(i - row * words) * 4, r = (int)(row % rows);
  const u8* group = in + (row - r) * in_row;
  const GroupedBody body{group + rows * header, terms + r * unit, n_terms, rows, unit};
  *(u32*)(out + row * out_row + p) =
      device_word(body, group + r * header, p, block, n_blocks, offsets, sizes, scale, factor);
}
