// States: tensors with one row per sequence, which recurrent kernels read and replace.
#pragma once
#include "common.cuh"

constexpr int ST_P_SEQS = 10;  // word of the step block: address of i64, the sequence of every segment

// The state of segment i, in a tensor of rows of `cols` floats.
DI float* state_row(const i64* st, i64 i, float* states, i64 cols) { return states + ((const i64*)st[ST_P_SEQS])[i] * cols; }
