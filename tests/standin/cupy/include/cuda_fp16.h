// __half: round to nearest even from float and from double, exact back. Arithmetic on it is left out on purpose:
// kernels compute in float, and mixing it with float is ambiguous, as under nvcc.
#pragma once

namespace standin {
// bits of the nearest 16-bit number with `mantissa` bits of fraction and exponent bias `bias`, ties to even
template <int mantissa, int bias> inline unsigned short to_half(double v) {
    const unsigned long long u = __builtin_bit_cast(unsigned long long, v);
    const unsigned short sign = (unsigned short)(u >> 48 & 0x8000u);
    const unsigned long long magnitude = u & 0x7fffffffffffffffull;
    const int exponent_bits = 15 - mantissa;
    const unsigned short inf = (unsigned short)(((1u << exponent_bits) - 1) << mantissa);
    if (magnitude > 0x7ff0000000000000ull) return 0x7fffu;  // CUDA's one NaN
    if (magnitude == 0) return sign;
    if (magnitude == 0x7ff0000000000000ull) return sign | inf;
    int exponent = (int)(magnitude >> 52) - 1023 + bias;
    unsigned long long fraction = (magnitude & 0xfffffffffffffull) | (1ull << 52);
    int shift = 52 - mantissa;
    if (exponent <= 0) { shift += 1 - exponent; exponent = 0; }
    if (shift > 62) return sign;
    unsigned long long kept = fraction >> shift;
    const unsigned long long rest = fraction & ((1ull << shift) - 1), tie = 1ull << (shift - 1);
    if (rest > tie || (rest == tie && (kept & 1))) ++kept;
    const unsigned long long out = exponent ? ((unsigned long long)(exponent - 1) << mantissa) + kept : kept;
    return out >= inf ? (unsigned short)(sign | inf) : (unsigned short)(sign | out);
}
inline float half_value(unsigned short h) {
    const unsigned int sign = (unsigned int)(h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ffu;
    if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | fraction << 13);
    if (exponent) return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
    const float small = (float)fraction * 5.9604644775390625e-08f;  // 2^-24
    return sign ? -small : small;
}
}  // namespace standin

struct __half_raw { unsigned short x; };
struct __half {
    unsigned short bits;
    __half() = default;
    __half(const __half_raw& v) : bits(v.x) {}
    __half(float v) : bits(standin::to_half<10, 15>(v)) {}
    __half(double v) : bits(standin::to_half<10, 15>(v)) {}
    __half(int v) : bits(standin::to_half<10, 15>(v)) {}
    __half(unsigned int v) : bits(standin::to_half<10, 15>(v)) {}
    __half(long long v) : bits(standin::to_half<10, 15>((double)v)) {}
    __half(unsigned long long v) : bits(standin::to_half<10, 15>((double)v)) {}
    operator float() const { return standin::half_value(bits); }
    operator __half_raw() const { return {bits}; }
};
typedef __half half;
#define STANDIN_NO_HALF(op) __half operator op(__half, __half) = delete;
STANDIN_NO_HALF(+) STANDIN_NO_HALF(-) STANDIN_NO_HALF(*) STANDIN_NO_HALF(/)
namespace standin { template <> struct kind<__half> { static const char value = 'f'; }; }

inline float __half2float(__half v) { return standin::half_value(v.bits); }
inline __half __float2half(float v) { return __half(v); }
inline __half __float2half_rn(float v) { return __half(v); }
inline __half __double2half(double v) { return __half(v); }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __ushort_as_half(unsigned short v) { return __half(__half_raw{v}); }
