"""The gated delta rule: token by token for a few, in chunks of matrix products for more.

A state holds blocks of 16 columns of v, [d_k][16], which do not depend on each other. In chunks (Yang et al.,
arXiv:2412.06464, with decays per column as in Kimi Linear, arXiv:2510.26692): with D(i, t) the product of the decays
of tokens i+1 .. t, what token t writes is

    u_t = beta_t (v_t - k_t D(0, t) S - sum over i < t of [k_t D(i, t) k_i] u_i)

so of a chunk all k D S are one product, the brackets (matrix L) are another, and the u come out by substitution, 16
rows at a time. Results are q D S plus another triangular matrix (P) times u. Decays only ever multiply: keys of earlier
blocks are kept as they are left at the beginning of the present block, so no factor is above 1 and nothing overflows.
"""

import numpy as np

from ikcli.backends.cpu.kernels.common import N_SEG, SEG_N_TOKENS, SEG_TOKEN, SEG_WORDS, SEGMENTS, next_work, state_word
from ikcli.backends.cpu.kernels.elements import sigmoid
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.state_products import blocks_at_once, make_state_product, solve16
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.backends.cpu.params_layers import DELTA_CHUNK, DeltaNetParams
from ikcli.native.jit import inline
from ikcli.native.simd.control import flush_denormals, restore_denormals
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_f32,
    ld_i64,
    load_f32x16,
    reduce_add,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vfma,
    vmul,
    vsub,
    zero_f32x16,
)

FEW_TOKENS = 8  # of a segment, up to which there are no chunks
_LINE = 64  # bytes of a row of 16 columns
_F0, _F1 = np.float32(0.0), np.float32(1.0)


def make_delta_net(dk, dv, by_column, few_tokens=FEW_TOKENS):
    n_block, k_chunks = dv // 16, dk // 16
    nv = blocks_at_once(n_block)
    u_row = _LINE * nv
    block_bytes = _LINE * dk
    rows_bytes = _LINE * DELTA_CHUNK  # of a chunk of 16 columns of all rows
    # Scratch: keys and queries (decayed; in chunks of 16 columns), keys transposed (in blocks of 16 tokens), L, P,
    # u, result, decay of a block of tokens, decay since the beginning of the chunk, beta.
    at_q = k_chunks * rows_bytes
    at_t = 2 * at_q
    at_l = at_t + DELTA_CHUNK // 16 * block_bytes
    at_p = at_l + DELTA_CHUNK // 16 * rows_bytes
    at_u = at_p + DELTA_CHUNK // 16 * rows_bytes
    at_o = at_u + nv * rows_bytes
    at_d = at_o + nv * rows_bytes
    at_e = at_d + 4 * dk
    at_beta = at_e + 4 * dk
    a_step = 4 if by_column else 0  # between the decays of two columns of k
    a_width = 4 * (dk if by_column else 1)  # ... of two heads
    pairs = make_state_product(1, "zero")  # of tokens
    product = pairs if nv == 1 else make_state_product(nv, "zero")
    add_product, scale_product = make_state_product(nv, "add"), make_state_product(nv, "scale")

    @inline
    def dot(a, b):
        acc = zero_f32x16()
        for i in range(0, dk, 16):
            acc = vfma(load_f32x16(a + 4 * i), load_f32x16(b + 4 * i), acc)
        return reduce_add(acc)

    @inline
    def step(s, q, k, v, a, beta, scale, qk, out):
        """Process one token, 16 columns of v: two passes over a block of the state, which is read from memory once."""
        # Four chains of additions, which do not wait for each other. The output needs the new state only as q S' = q D
        # S + (q k) u, so D S is read once for both sums.
        r0, r1, r2, r3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        y0, y1, y2, y3 = r0, r0, r0, r0
        for i in range(0, dk, 4):
            at = s + _LINE * i
            s0 = vmul(load_f32x16(at), bcast_f32x16(a + a_step * i))
            s1 = vmul(load_f32x16(at + 64), bcast_f32x16(a + a_step * (i + 1)))
            s2 = vmul(load_f32x16(at + 128), bcast_f32x16(a + a_step * (i + 2)))
            s3 = vmul(load_f32x16(at + 192), bcast_f32x16(a + a_step * (i + 3)))
            r0, y0 = vfma(s0, bcast_f32x16(k + 4 * i), r0), vfma(s0, bcast_f32x16(q + 4 * i), y0)
            r1, y1 = vfma(s1, bcast_f32x16(k + 4 * i + 4), r1), vfma(s1, bcast_f32x16(q + 4 * i + 4), y1)
            r2, y2 = vfma(s2, bcast_f32x16(k + 4 * i + 8), r2), vfma(s2, bcast_f32x16(q + 4 * i + 8), y2)
            r3, y3 = vfma(s3, bcast_f32x16(k + 4 * i + 12), r3), vfma(s3, bcast_f32x16(q + 4 * i + 12), y3)
        read = vadd(vadd(r0, r1), vadd(r2, r3))
        u = vmul(vsub(load_f32x16(v), read), splat_f32x16(beta))
        y = vfma(u, splat_f32x16(qk), vadd(vadd(y0, y1), vadd(y2, y3)))
        store_f32x16(out, vmul(y, splat_f32x16(scale)))
        for i in range(dk):
            # Decayed again instead of stored by the first pass: a multiplication is cheaper than writing the block
            # twice.
            kept = vmul(load_f32x16(s + _LINE * i), bcast_f32x16(a + a_step * i))
            store_f32x16(s + _LINE * i, vfma(u, bcast_f32x16(k + 4 * i), kept))

    @inline
    def clear(at, n_lines):
        for i in range(n_lines):
            store_f32x16(at + _LINE * i, zero_f32x16())

    @inline
    def tokens_of_block(work, row, q, q_stride, k, k_stride, a, a_stride, n, scale):
        """Stage rows row .. row+15 of keys and queries, decayed since the beginning of these rows; n < 16 exist."""
        decay = work + at_d
        for i in range(0, dk, 16):
            store_f32x16(decay + 4 * i, splat_f32x16(_F1))
        for t in range(16):
            to = work + _LINE * (row + t)
            for i in range(0, dk, 16):
                at = to + (i >> 4) * rows_bytes
                if t < n:
                    if by_column:
                        factor = load_f32x16(a + t * a_stride + 4 * i)
                    else:
                        factor = bcast_f32x16(a + t * a_stride)
                    now = vmul(load_f32x16(decay + 4 * i), factor)
                    store_f32x16(decay + 4 * i, now)
                    store_f32x16(at, vmul(load_f32x16(k + t * k_stride + 4 * i), now))
                    rows = vmul(load_f32x16(q + t * q_stride + 4 * i), splat_f32x16(scale))
                    store_f32x16(at + at_q, vmul(rows, now))
                else:
                    # Missing tokens are zeros, so that products take whole blocks.
                    store_f32x16(at, zero_f32x16())
                    store_f32x16(at + at_q, zero_f32x16())

    @inline
    def pairs_of_block(work, block, q, q_stride, k, k_stride, a, a_stride, n, scale):
        """Compute L and P of 16 tokens among themselves; leave their keys, transposed, decayed to the last of them."""
        keys, to = work + at_t + block * block_bytes, block * rows_bytes + _LINE * 16 * block
        clear(keys, dk)
        clear(work + at_l + to, 16)
        clear(work + at_p + to, 16)
        for t in range(n):
            # Lane i holds key i, decayed up to token t. `here` puts the new key into its lane; one sum over the columns
            # is then the product with all earlier keys, and `past` leaves out the key itself.
            here, past = load_f32x16(unit_row(work, t)), load_f32x16(unit_row(work, t) + _LINE)
            # Two chains of additions for each sum, which do not wait for each other.
            l0, l1, p0, p1 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
            kt, qt, at = k + t * k_stride, q + t * q_stride, a + t * a_stride
            for i in range(0, dk, 2):
                k0, k1 = bcast_f32x16(kt + 4 * i), bcast_f32x16(kt + 4 * i + 4)
                to_0, to_1 = keys + _LINE * i, keys + _LINE * i + _LINE
                row0 = vfma(here, k0, vmul(load_f32x16(to_0), bcast_f32x16(at + a_step * i)))
                row1 = vfma(here, k1, vmul(load_f32x16(to_1), bcast_f32x16(at + a_step * (i + 1))))
                store_f32x16(to_0, row0)
                store_f32x16(to_1, row1)
                l0, l1 = vfma(row0, k0, l0), vfma(row1, k1, l1)
                p0, p1 = vfma(row0, bcast_f32x16(qt + 4 * i), p0), vfma(row1, bcast_f32x16(qt + 4 * i + 4), p1)
            store_f32x16(work + at_l + to + _LINE * t, vmul(vadd(l0, l1), past))
            store_f32x16(work + at_p + to + _LINE * t, vmul(vadd(p0, p1), splat_f32x16(scale)))

    @inline
    def unit_row(work, t):
        """Return the address of a row that is 1 in column t only, followed by one that is 1 before column t."""
        return work + at_beta + 4 * DELTA_CHUNK + 2 * _LINE * t

    @inline
    def fill_unit_rows(work):
        for t in range(16):
            for i in range(16):
                st_f32(unit_row(work, t) + 4 * i, _F1 if i == t else _F0)
                st_f32(unit_row(work, t) + _LINE + 4 * i, _F1 if i < t else _F0)

    @inline
    def prepare(work, q, q_stride, k, k_stride, a, a_stride, beta, beta_stride, n, scale):
        """Compute the part of a chunk that is the same for every column of v."""
        since = work + at_e
        for i in range(0, dk, 16):
            store_f32x16(since + 4 * i, splat_f32x16(_F1))
        for block in range((n + 15) >> 4):
            row = 16 * block
            left = min(n - row, 16)
            qb, kb, ab = q + row * q_stride, k + row * k_stride, a + row * a_stride
            tokens_of_block(work, row, qb, q_stride, kb, k_stride, ab, a_stride, left, scale)
            for j in range(block):
                # Keys of block j have decayed to the beginning of this block, its own rows since then.
                to = j * rows_bytes + _LINE * row
                keys = work + at_t + j * block_bytes
                pairs(work + _LINE * row, rows_bytes, 16, keys, _LINE, 0, k_chunks, work + at_l + to, _LINE, 0, 0, 0)
                pairs(work + at_q + _LINE * row, rows_bytes, 16, keys, _LINE, 0, k_chunks, work + at_p + to, _LINE, 0,
                      0, 0)  # fmt: skip
            pairs_of_block(work, block, qb, q_stride, kb, k_stride, ab, a_stride, left, scale)
            for t in range(16):
                b = sigmoid(ld_f32(beta + (row + t) * beta_stride)) if t < left else _F0
                st_f32(work + at_beta + 4 * (row + t), b)
                for j in range(block + 1):
                    at = work + at_l + j * rows_bytes + _LINE * (row + t)
                    # With -beta in L, substitution only has to add.
                    store_f32x16(at, vmul(load_f32x16(at), splat_f32x16(-b)))
            for j in range(block):
                keys = work + at_t + j * block_bytes
                for i in range(dk):
                    at = keys + _LINE * i
                    # On to the end of this block, for the blocks that follow.
                    store_f32x16(at, vmul(load_f32x16(at), bcast_f32x16(work + at_d + 4 * i)))
            for i in range(0, dk, 16):
                # Products between blocks are done. From here on rows meet the state, which is as old as the chunk.
                before = load_f32x16(since + 4 * i)
                at = work + (i >> 4) * rows_bytes + _LINE * row
                for t in range(16):
                    store_f32x16(at + _LINE * t, vmul(load_f32x16(at + _LINE * t), before))
                    store_f32x16(at + at_q + _LINE * t, vmul(load_f32x16(at + at_q + _LINE * t), before))
                store_f32x16(since + 4 * i, vmul(before, load_f32x16(work + at_d + 4 * i)))

    @inline
    def columns(work, s, v, v_stride, n, out, out_stride):
        """Process 16 or 32 columns of v of a chunk."""
        n_blocks = (n + 15) >> 4
        u, y = work + at_u, work + at_o
        # What the state answers to the keys, then to the queries.
        product(work, rows_bytes, 16 * n_blocks, s, _LINE, block_bytes, k_chunks, u, u_row, _LINE, 0, 0)
        product(work + at_q, rows_bytes, 16 * n_blocks, s, _LINE, block_bytes, k_chunks, y, u_row, _LINE, 0, 0)
        for t in range(n):
            # What the token would write if no other token of the chunk had written.
            beta = bcast_f32x16(work + at_beta + 4 * t)
            for i in range(0, u_row, _LINE):
                at = u + u_row * t + i
                store_f32x16(at, vmul(vsub(load_f32x16(v + t * v_stride + i), load_f32x16(at)), beta))
        clear(u + u_row * n, nv * (16 * n_blocks - n))
        for block in range(n_blocks):
            rows, to = _LINE * 16 * block, u_row * 16 * block
            # Earlier blocks are one product; only the 16 tokens of a block wait for each other.
            if block > 0:
                add_product(work + at_l + rows, rows_bytes, 16, u, u_row, _LINE, block, u + to, u_row, _LINE, 0, 0)
            for i in range(0, u_row, _LINE):
                solve16(work + at_l + block * rows_bytes + rows, u + to + i, u_row)
            add_product(work + at_p + rows, rows_bytes, 16, u, u_row, _LINE, block + 1, y + to, u_row, _LINE, 0, 0)
        for t in range(n):
            for i in range(0, u_row, _LINE):
                store_f32x16(out + t * out_stride + i, load_f32x16(y + u_row * t + i))
        # Keys were left decayed to the end of the chunk, so all its tokens write in one product.
        scale_product(work + at_t, block_bytes, dk, u, u_row, _LINE, n_blocks, s, _LINE, block_bytes, work + at_e, 4)

    @kernel(DeltaNetParams)
    def delta_net(params, ith, nth):
        mode = flush_denormals()
        heads, k_heads, scale = params.heads, params.k_heads, params.scale
        q_stride, k_stride, v_stride = params.q.stride, params.k.stride, params.v.stride
        a_stride, beta_stride, out_stride = a_width * heads, 4 * heads, 4 * dv * heads
        work = params.scratch + ith * params.scratch_bytes
        segments, n_seg = state_word(params, SEGMENTS), state_word(params, N_SEG)
        parts = 1  # of the columns of a head
        # Blocks of columns are independent: a head is divided where there are fewer heads than threads.
        while n_seg * heads * parts < 2 * nth and n_block % (2 * parts * nv) == 0:
            parts *= 2
        width = n_block // parts
        n_items = n_seg * heads * parts
        filled = False
        while True:
            item = next_work(params, 1)
            if item >= n_items:
                break
            part, head, i = item % parts, item // parts % heads, item // (parts * heads)
            start = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_TOKEN))
            n = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_N_TOKENS))
            k_head = head % k_heads if params.tiled != 0 else head // (heads // k_heads)
            s = state_row(params, i, params.states, params.state_bytes) + (head * n_block + part * width) * block_bytes
            q = params.q.at + start * q_stride + k_head * params.q.head_stride
            k = params.k.at + start * k_stride + k_head * params.k.head_stride
            v = params.v.at + start * v_stride + head * params.v.head_stride + _LINE * part * width
            a = params.decay + start * a_stride + head * a_width
            beta = params.beta + start * beta_stride + 4 * head
            out = params.out + start * out_stride + 4 * head * dv + _LINE * part * width
            if begins(params, i):
                clear(s, width * dk)
            if n <= few_tokens:
                # Preparing a chunk costs more than a few steps, each of which reads the state from memory once.
                for t in range(n):
                    qt, kt = q + t * q_stride, k + t * k_stride
                    qk, b = dot(qt, kt), sigmoid(ld_f32(beta + t * beta_stride))
                    for j in range(width):
                        step(s + j * block_bytes, qt, kt, v + t * v_stride + _LINE * j, a + t * a_stride, b, scale, qk,
                             out + t * out_stride + _LINE * j)  # fmt: skip
                continue
            if not filled:
                fill_unit_rows(work)
                filled = True
            for t in range(0, n, DELTA_CHUNK):
                left = min(n - t, DELTA_CHUNK)
                prepare(work, q + t * q_stride, q_stride, k + t * k_stride, k_stride, a + t * a_stride, a_stride,
                        beta + t * beta_stride, beta_stride, left, scale)  # fmt: skip
                for j in range(0, width, nv):
                    columns(work, s + j * block_bytes, v + t * v_stride + _LINE * j, v_stride, left,
                            out + t * out_stride + _LINE * j, out_stride)  # fmt: skip
        restore_denormals(mode)

    return delta_net
