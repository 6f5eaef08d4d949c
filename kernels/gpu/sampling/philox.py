"""Philox4x32-10 and Gumbel noise inside a kernel, as kernels/philox.py defines them.

The integers are equal bit for bit; the noise is within two units in the last place, for each
logarithm. Launches nothing; called by sample.py's kernel.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four words of noise for counters (c0, c1, c2, c3) under keys (k0, k1), all uint32.

    Salmon et al. 2011, Random123.
    """
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high2, low2 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(bits):
    """-log(-log(u)) of u = ((bits >> 9) + 0.5) / 2**23, which is exact in float32."""
    u = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(u))
