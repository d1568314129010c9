"""Run Mamba 2's scan: token by token for a few, in chunks of matrix products for more (Dao and Gu, arXiv:2405.21060).

A state holds blocks of 16 columns of x, [n_state][16], which do not depend on each other. With D(i, t) the product of
the decays of tokens i+1 .. t and u = step * x, a chunk of tokens gives

    y_t = D(start, t) c_t H + sum over i <= t of [c_t b_i D(i, t)] u_i;  H = D(start, end) H + sum of b_i D(i, end) u_i

The products of c and b are the same for all heads of a group. Decays only ever multiply, row after row of the brackets,
so no factor is above 1 and nothing overflows.
"""

import numpy as np

from ikcli.backends.cpu.kernels.common import N_SEG, SEG_N_TOKENS, SEG_TOKEN, SEG_WORDS, SEGMENTS, next_work, state_word
from ikcli.backends.cpu.kernels.delta_net import FEW_TOKENS
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import transpose16
from ikcli.backends.cpu.kernels.state_products import blocks_at_once, make_state_product
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.backends.cpu.params_layers import DELTA_CHUNK, Mamba2ScanParams
from ikcli.native.jit import inline
from ikcli.native.simd.control import flush_denormals, restore_denormals
from ikcli.native.simd.math import vexp, vsoftplus
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_f32,
    ld_i64,
    load_f32x16,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vfma,
    vmul,
    zero_f32x16,
)

HEADS_AT_ONCE = 16  # that share what is computed once for a chunk
_LINE = 64  # bytes of a row of 16 columns
_F0, _F1 = np.float32(0.0), np.float32(1.0)


def make_mamba2_scan(n_state, width, few_tokens=FEW_TOKENS):
    """Return the kernel for heads of `width` columns; both sizes are multiples of 16."""
    n_block, n_chunks = width // 16, n_state // 16
    nv = blocks_at_once(n_block)
    u_row = _LINE * nv
    block_bytes = _LINE * n_state
    rows_bytes = _LINE * DELTA_CHUNK  # of 16 columns of all rows
    # Scratch: c (in chunks of 16 columns), b transposed (in blocks of 16 tokens), c b' and the brackets (both in chunks
    # of 16 tokens), u, u as it is left at the end, results, then per token: steps, decays, products of decays.
    at_b = n_chunks * rows_bytes
    at_g = at_b + DELTA_CHUNK // 16 * block_bytes
    at_p = at_g + DELTA_CHUNK // 16 * rows_bytes
    at_u = at_p + DELTA_CHUNK // 16 * rows_bytes
    at_w = at_u + nv * rows_bytes
    at_y = at_w + nv * rows_bytes
    at_step = at_y + nv * rows_bytes
    at_decay = at_step + 4 * DELTA_CHUNK
    at_since = at_decay + 4 * DELTA_CHUNK
    at_left = at_since + 4 * DELTA_CHUNK
    pairs = make_state_product(1, "zero")  # of tokens
    product = pairs if nv == 1 else make_state_product(nv, "zero")
    scale_product = make_state_product(nv, "scale")

    @inline
    def clear(at, n_lines):
        for i in range(n_lines):
            store_f32x16(at + _LINE * i, zero_f32x16())

    @inline
    def equal_steps(work, a, n):
        """Set the steps of n tokens to 1, so that all have the same decay."""
        decay = vexp(splat_f32x16(a))
        for t in range(0, n, 16):
            store_f32x16(work + at_step + 4 * t, splat_f32x16(_F1))
            store_f32x16(work + at_decay + 4 * t, decay)

    @inline
    def steps(work, dt, dt_stride, bias, a, n):
        """Compute step and decay of n tokens; those behind them leave everything as it is."""
        for t in range(min((n + 15) & ~15, DELTA_CHUNK)):
            st_f32(work + at_step + 4 * t, ld_f32(dt + t * dt_stride) + bias if t < n else _F0)
        for t in range(0, n, 16):
            step = vsoftplus(load_f32x16(work + at_step + 4 * t))
            store_f32x16(work + at_step + 4 * t, step)
            store_f32x16(work + at_decay + 4 * t, vexp(vmul(step, splat_f32x16(a))))

    @inline
    def one_token(h, step, decay, b, c, x, d, out):
        """Advance and read 16 columns of a head."""
        row = load_f32x16(x)
        taken, y0, y1 = vmul(step, row), vmul(d, row), zero_f32x16()
        for i in range(0, n_state, 2):
            at = h + _LINE * i
            h0 = vfma(taken, bcast_f32x16(b + 4 * i), vmul(decay, load_f32x16(at)))
            h1 = vfma(taken, bcast_f32x16(b + 4 * i + 4), vmul(decay, load_f32x16(at + _LINE)))
            store_f32x16(at, h0)
            store_f32x16(at + _LINE, h1)
            y0, y1 = vfma(h0, bcast_f32x16(c + 4 * i), y0), vfma(h1, bcast_f32x16(c + 4 * i + 4), y1)
        store_f32x16(out, vadd(y0, y1))

    @inline
    def stage(work, b, b_stride, c, c_stride, n):
        """Compute what a chunk's heads share: c, b transposed, and their products."""
        for block in range((n + 15) >> 4):
            left = min(n - 16 * block, 16)
            for chunk in range(n_chunks):
                to = work + chunk * rows_bytes + _LINE * 16 * block
                for t in range(16):
                    row = zero_f32x16()
                    if t < left:
                        row = load_f32x16(c + (16 * block + t) * c_stride + _LINE * chunk)
                    store_f32x16(to + _LINE * t, row)
                    row = zero_f32x16()
                    if t < left:
                        row = load_f32x16(b + (16 * block + t) * b_stride + _LINE * chunk)
                    store_f32x16(work + at_y + _LINE * t, row)
                transpose16(work + at_y, _LINE, work + at_b + block * block_bytes + 16 * _LINE * chunk, _LINE)
            for j in range(block + 1):
                pairs(work + _LINE * 16 * block, rows_bytes, 16, work + at_b + j * block_bytes, _LINE, 0, n_chunks,
                      work + at_g + j * rows_bytes + _LINE * 16 * block, _LINE, 0, 0, 0)  # fmt: skip

    @inline
    def brackets(work, n):
        """Weaken the products of c and b by the decays between their tokens; leave the products of decays."""
        left = work + at_left
        clear(left, DELTA_CHUNK // 16)
        since = _F1
        for t in range((n + 15) & ~15):
            decay = ld_f32(work + at_decay + 4 * t) if t < n else _F1
            since = since * decay
            st_f32(work + at_since + 4 * t, since)
            for j in range((t >> 4) + 1):
                store_f32x16(left + _LINE * j, vmul(load_f32x16(left + _LINE * j), splat_f32x16(decay)))
            st_f32(left + 4 * t, _F1)
            for j in range((t >> 4) + 1):
                at = j * rows_bytes + _LINE * t
                factors = load_f32x16(left + _LINE * j)
                store_f32x16(work + at_p + at, vmul(load_f32x16(work + at_g + at), factors))

    @inline
    def columns(work, h, x, x_stride, d, n, out, out_stride):
        """Process 16 or 32 columns of a head."""
        n_blocks = (n + 15) >> 4
        u, w, y = work + at_u, work + at_w, work + at_y
        product(work, rows_bytes, 16 * n_blocks, h, _LINE, block_bytes, n_chunks, y, u_row, _LINE, 0, 0)
        for t in range(n):
            step, left = bcast_f32x16(work + at_step + 4 * t), bcast_f32x16(work + at_left + 4 * t)
            for i in range(0, u_row, _LINE):
                taken = vmul(step, load_f32x16(x + t * x_stride + i))
                store_f32x16(u + u_row * t + i, taken)
                store_f32x16(w + u_row * t + i, vmul(taken, left))
        missing = nv * (16 * n_blocks - n)
        clear(u + u_row * n, missing)
        clear(w + u_row * n, missing)
        for block in range(n_blocks):
            # What the state gives has decayed since the beginning of the chunk.
            scale_product(work + at_p + _LINE * 16 * block, rows_bytes, 16, u, u_row, _LINE, block + 1,
                          y + u_row * 16 * block, u_row, _LINE, work + at_since + 4 * 16 * block, 4)  # fmt: skip
        for t in range(n):
            for i in range(0, u_row, _LINE):
                through = vmul(d, load_f32x16(x + t * x_stride + i))
                store_f32x16(out + t * out_stride + i, vadd(load_f32x16(y + u_row * t + i), through))
        scale_product(work + at_b, block_bytes, n_state, w, u_row, _LINE, n_blocks, h, _LINE, block_bytes,
                      work + at_since + 4 * (n - 1), 0)  # fmt: skip

    @kernel(Mamba2ScanParams)
    def mamba2_scan(params, ith, nth):
        mode = flush_denormals()
        heads, groups = params.heads, params.groups
        x_stride, b_stride, c_stride = params.x.stride, params.b.stride, params.c.stride
        dt_stride, out_stride = 4 * heads, 4 * width * heads
        work = params.scratch + ith * params.scratch_bytes
        segments, n_seg = state_word(params, SEGMENTS), state_word(params, N_SEG)
        parts, of_group = 1, heads // groups
        # The states of a part stay in the second-level cache from chunk to chunk.
        while (n_seg * groups * parts < 2 * nth or of_group > HEADS_AT_ONCE * parts) and parts < of_group:
            parts = min(2 * parts, of_group)
        n_items = n_seg * groups * parts
        while True:
            item = next_work(params, 1)
            if item >= n_items:
                break
            part, group, i = item % parts, item // parts % groups, item // (parts * groups)
            start = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_TOKEN))
            n = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_N_TOKENS))
            first, last = group * of_group + of_group * part // parts, group * of_group + of_group * (part + 1) // parts
            state = state_row(params, i, params.states, params.state_bytes)
            b = params.b.at + start * b_stride + group * params.b.head_stride
            c = params.c.at + start * c_stride + group * params.c.head_stride
            x = params.x.at + start * x_stride
            out, dt = params.out + start * out_stride, params.dt + start * dt_stride
            if begins(params, i):
                clear(state + first * n_block * block_bytes, (last - first) * n_block * n_state)
            t = 0
            while t < n:
                left = min(n - t, DELTA_CHUNK)
                in_chunks = n > few_tokens
                bt, ct = b + t * b_stride, c + t * c_stride
                if in_chunks:
                    stage(work, bt, b_stride, ct, c_stride, left)
                for head in range(first, last):
                    if params.dt == 0:
                        equal_steps(work, ld_f32(params.a + 4 * head), left)
                    else:
                        steps(work, dt + t * dt_stride + 4 * head, dt_stride, ld_f32(params.dt_bias + 4 * head),
                              ld_f32(params.a + 4 * head), left)  # fmt: skip
                    d = bcast_f32x16(params.d + 4 * head)
                    h = state + head * n_block * block_bytes
                    xt = x + t * x_stride + head * params.x.head_stride
                    to = out + t * out_stride + 4 * width * head
                    if in_chunks:
                        brackets(work, left)
                        for j in range(0, n_block, nv):
                            columns(work, h + j * block_bytes, xt + _LINE * j, x_stride, d, left, to + _LINE * j,
                                    out_stride)  # fmt: skip
                    else:
                        for s in range(left):
                            step = bcast_f32x16(work + at_step + 4 * s)
                            decay = bcast_f32x16(work + at_decay + 4 * s)
                            for j in range(n_block):
                                one_token(h + j * block_bytes, step, decay, bt + s * b_stride, ct + s * c_stride,
                                          xt + s * x_stride + _LINE * j, d,
                                          to + s * out_stride + _LINE * j)  # fmt: skip
                t += left
        restore_denormals(mode)

    return mamba2_scan
