// The gated delta rule by chunks, what is sequential: the state goes through the chunks of a segment.
//
// All is transposed: rows of the tensor cores' results are columns of v, so that results are operands of the next product
// as they are. A block has 32 columns of v: two groups of four warps. Of the state a warp keeps 32 rows (columns of k), of u
// and of the results 16 tokens; what others need of them goes through shared memory as operands. A chunk is four steps, each
// with an operand of its own (W, q, k, P), which come through a ring of STAGES buffers.
#include "delta_chunks.cuh"

constexpr int SLICE = 32, UNIT = 2 * TILE;
constexpr int OPERAND = 2 * 512;  // bytes of 16 x 16, upper and lower parts

DI void put(u8* at, const Split4& f) {
  uint4* to = (uint4*)at + (threadIdx.x & 31);
  to[0] = make_uint4(f.hi[0], f.hi[1], f.hi[2], f.hi[3]);
  to[32] = make_uint4(f.lo[0], f.lo[1], f.lo[2], f.lo[3]);
}
DI void get(Split4& f, const u8* at) {
  const uint4 *from = (const uint4*)at + (threadIdx.x & 31), hi = from[0], lo = from[32];
  f.hi[0] = hi.x, f.hi[1] = hi.y, f.hi[2] = hi.z, f.hi[3] = hi.w;
  f.lo[0] = lo.x, f.lo[1] = lo.y, f.lo[2] = lo.z, f.lo[3] = lo.w;
}

// Largest numbers of rows, of which a warp has a part: first noted, after a barrier read by the four warps of the rows.
DI void note_most(float* most, float a, float b) {
  const int lane = threadIdx.x & 31;
  a = fmaxf(a, shx(a, 1)), b = fmaxf(b, shx(b, 1));
  a = fmaxf(a, shx(a, 2)), b = fmaxf(b, shx(b, 2));
  if ((lane & 3) == 0) {
    float* at = most + (threadIdx.x >> 5) * 16 + (lane >> 2);
    at[0] = a, at[8] = b;
  }
}
// Powers for rows lane / 4 and lane / 4 + 8, and their inverses.
DI void read_most(const float* most, float (&power)[2], float (&inverse)[2]) {
  const float* at = most + (threadIdx.x >> 7) * 64 + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float2 p = power_for(fmaxf(fmaxf(at[8 * i], at[8 * i + 16]), fmaxf(at[8 * i + 32], at[8 * i + 48])));
    power[i] = p.x, inverse[i] = p.y;
  }
}

template <bool BY_COLUMN, int STAGES>
DI void delta_scan_steps(const i64* st, float* states, i64 state_cols, Work work, float* out, int n_head, int n_head_k, int dk,
                         int dv, float scale, int tiled) {
  SMEM_DECL
  u8 *s_state = smem_raw + STAGES * UNIT, *s_u = s_state + 16 * OPERAND, *s_left = s_u + 8 * OPERAND;
  float *most_u = (float*)(s_left + 8 * OPERAND), *most_s = most_u + 128;
  if ((i64)blockIdx.x >= st[ST_SEGMENTS]) return;
  const i64* segment = step_segments(st) + (i64)blockIdx.x * SEG_WORDS;
  const int n = (int)segment[SEG_TOKENS], slot = (int)first_slot(segment, blockIdx.x) - work.slot0;
  const int first = max(0, -slot), last = min((n + CHUNK - 1) / CHUNK, work.n_slots - slot);
  if (first >= last) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m = warp >> 2, g = warp & 3, head = blockIdx.y;
  const int row = blockIdx.z * SLICE + 16 * m, pair = 2 * (lane & 3);
  const bool in = row < dv;  // of whole warps, all of which take part in barriers
  const int k_head = BY_COLUMN ? head : tiled ? head % n_head_k : head / (n_head / n_head_k);
  const int key_heads = BY_COLUMN ? n_head : n_head_k;
  u8 *my_state = s_state + m * 8 * OPERAND, *my_u = s_u + m * 4 * OPERAND, *my_left = s_left + m * 4 * OPERAND;

  auto copy = [&](int step) {
    const int chunk = first + (step >> 2), kind = step & 3;
    if (chunk < last) {
      const i64 item = slot + chunk;
      const u8* from = work.terms + (item * n_head + head) * TERMS + (kind == 3 ? 2 * TILE : 0);
      if (kind == 1 || kind == 2) from = work.keys + (item * key_heads + k_head) * KEYS + (kind - 1) * UNIT;
      u8* to = smem_raw + step % STAGES * UNIT;
      const int size = kind == 3 ? TILE : UNIT;
      for (int i = threadIdx.x * 16; i < size; i += THREADS * 16) cp16(to + i, from + i, true);
    }
    cp_commit();
  };
  int step = 0;
  auto next = [&]() {  // waits for the operand of a step, lets a further one come where that of the last step was
    // The barrier also tells that all warps are done with the last step, whose buffer the copy overwrites.
    cp_wait<STAGES - 2>();
    __syncthreads();
    copy(step + STAGES - 1);
    return (const u8*)(smem_raw + step++ % STAGES * UNIT);
  };
  // All buffers but one are on their way before the first product; the last one is the first to be filled in the loop.
  for (int i = 0; i < STAGES - 1; i++) copy(i);

  // state[h][x]: columns of k from 64 h + 16 g + 8 x on, as accumulators have them
  float* s = state_row(st, blockIdx.x, states, state_cols) + (i64)head * dk * dv + (i64)row * dk + (lane >> 2);
  const bool begins = first == 0 && segment[SEG_POS] == 0;
  float state[2][2][4], power[2], inverse[2];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int col = 64 * (i >> 3) + 16 * g + 8 * (i >> 2 & 1) + pair + (i & 1);
    state[i >> 3][i >> 2 & 1][i & 3] = in && col < dk && !begins ? s[(i64)col * 16 + 8 * (i >> 1 & 1)] : 0.f;
  }
  auto note_state = [&]() {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float v = fabsf(state[i >> 3][i >> 2 & 1][i & 3]);
      // Accumulators 0, 1 are of row lane / 4, accumulators 2, 3 of the row 8 below: each row has a power of its own.
      if (i & 2) b = fmaxf(b, v);
      else a = fmaxf(a, v);
    }
    note_most(most_s, a, b);
  };
  auto share_state = [&]() {
    read_most(most_s, power, inverse);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float c[2][4];
#pragma unroll
      for (int i = 0; i < 8; i++) c[i >> 2][i & 3] = state[h][i >> 2][i & 3] * power[i >> 1 & 1];
      Split4 f;
      as_a(f, c);
      // As the operand that a product loads, so the other warps of the group need no shuffles.
      put(my_state + (4 * h + g) * OPERAND, f);
    }
  };
  auto state_times = [&](Sums& c, const u8* tiles) {  // rows of v, 16 tokens
    clear(c);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      Split4 a, b;
      get(a, my_state + k * OPERAND);
      load_b(b, tiles + (k >> 2) * TILE, 16 * g, 2 * (k & 3));
      multiply(c, a, b);
    }
  };
  note_state();
  __syncthreads();
  share_state();

  for (int chunk = first; chunk < last; chunk++) {
    const i64 item = (i64)(slot + chunk) * n_head + head;
    const float* wanted = work.wanted + (item * dv + row + (lane >> 2)) * CHUNK + 16 * g + pair;
    const float* factors = work.factors + item * FACTORS;
    const u8* tiles = next();
    float u[2][4], o[2][4], kept[2][2][2], since[2][2], left[2][2], u_power[2], u_inverse[2];
    Sums c;
    if (in) {
#pragma unroll
      for (int x = 0; x < 2; x++) {
#pragma unroll
        for (int i = 0; i < 2; i++) *(float2*)&u[x][2 * i] = *(const float2*)(wanted + 8 * i * CHUNK + 8 * x);
        const int token = 16 * g + 8 * x + pair;
        if (!BY_COLUMN) {
          *(float2*)since[x] = *(const float2*)(factors + DK + token);
          *(float2*)left[x] = *(const float2*)(factors + DK + CHUNK + token);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) *(float2*)kept[h][x] = *(const float2*)(factors + 64 * h + token);
      }
      // u = T V - W S: W comes with its sign turned.
      state_times(c, tiles);
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float& v = u[i >> 2][i & 3];
        v = fmaf(total(c, i >> 2, i & 3), inverse[i >> 1 & 1], v);
        if (i & 2) b = fmaxf(b, fabsf(v));
        else a = fmaxf(a, fabsf(v));
      }
      note_most(most_u, a, b);
    }

    tiles = next();
    if (in) {
      read_most(most_u, u_power, u_inverse);
#pragma unroll
      for (int i = 0; i < 8; i++) u[i >> 2][i & 3] *= u_power[i >> 1 & 1];
      Split4 f;
      as_a(f, u);
      put(my_u + g * OPERAND, f);
      if (!BY_COLUMN) {
#pragma unroll
        for (int i = 0; i < 8; i++) u[i >> 2][i & 3] *= left[i >> 2][i & 1];
        as_a(f, u);
        put(my_left + g * OPERAND, f);
      }
      // What the tokens read from the state before the chunk; their own writes follow with P.
      state_times(c, tiles);
#pragma unroll
      for (int i = 0; i < 8; i++)
        o[i >> 2][i & 3] = total(c, i >> 2, i & 3) * inverse[i >> 1 & 1] * (BY_COLUMN ? 1.f : since[i >> 2][i & 1]);
    }

    tiles = next();
    if (in) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        clear(c);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          Split4 a, b;
          get(a, (BY_COLUMN ? my_u : my_left) + k * OPERAND);
          load_bt(b, tiles + h * TILE, 16 * k, 2 * g);
          multiply(c, a, b);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float& v = state[h][i >> 2][i & 3];
          // The state decays by the whole chunk in f32, in registers; only the products are rounded.
          v = fmaf(total(c, i >> 2, i & 3), u_inverse[i >> 1 & 1], v * kept[h][i >> 2][i & 1]);
        }
      }
      note_state();
    }

    tiles = next();
    if (in) {
      // Early, for the next chunk: the barriers of its first step make it visible.
      share_state();
      clear(c);
      // P is 0 above its diagonal: later tokens are left out.
      for (int k = 0; k <= g; k++) {
        Split4 a, b;
        get(a, my_u + k * OPERAND);
        load_b(b, tiles, 16 * g, 2 * k);
        multiply(c, a, b);
      }
      float* to = out + ((segment[SEG_START] + (i64)chunk * CHUNK) * n_head + head) * dv + row + (lane >> 2);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int token = 16 * g + 8 * (i >> 2) + pair + (i & 1);
        const float y = fmaf(total(c, i >> 2, i & 3), u_inverse[i >> 1 & 1], o[i >> 2][i & 3]);
        if (chunk * CHUNK + token < n) to[(i64)token * n_head * dv + 8 * (i >> 1 & 1)] = y * scale;
      }
    }
  }
  cp_wait<0>();
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int col = 64 * (i >> 3) + 16 * g + 8 * (i >> 2 & 1) + pair + (i & 1);
    if (in && col < dk) s[(i64)col * 16 + 8 * (i >> 1 & 1)] = state[i >> 3][i >> 2 & 1][i & 3];
  }
}

// grid (segments, heads, parts of 32 columns of v)
#define DELTA_SCAN(NAME, SCAN)                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                    \
  NAME(const i64* st, float* states, i64 state_cols, u8* terms, u8* keys, float* wanted, float* factors, int slot0,           \
       int n_slots, float* out, int n_head, int n_head_k, int dk, int dv, float scale, int tiled) {                           \
    SCAN(st, states, state_cols, {terms, keys, wanted, factors, slot0, n_slots}, out, n_head, n_head_k, dk, dv, scale, tiled); \
  }
DELTA_SCAN(delta_scan, (delta_scan_steps<false, 2>))
DELTA_SCAN(delta_scan_columns, (delta_scan_steps<true, 2>))
DELTA_SCAN(delta_scan_s4, (delta_scan_steps<false, 4>))
DELTA_SCAN(delta_scan_s4_columns, (delta_scan_steps<true, 4>))
