/* The gates of feed-forward layers, on vectors of float; used by linear.c. */
#include "common.h"

INLINE vf silu(vf x) { return x / (1.0f + exp_of(-x)); }

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

INLINE vf gelu(vf x, int by_tanh) {
    if (by_tanh) return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
    vf y = x;
    for (int i = 0; i < VW; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}
