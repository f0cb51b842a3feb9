// __nv_bfloat16, as cuda_fp16.h has __half.
#pragma once
#include "cuda_fp16.h"

struct __nv_bfloat16_raw { unsigned short x; };
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(const __nv_bfloat16_raw& v) : bits(v.x) {}
    __nv_bfloat16(float v) : bits(standin::to_half<7, 127>(v)) {}
    __nv_bfloat16(double v) : bits(standin::to_half<7, 127>(v)) {}
    __nv_bfloat16(int v) : bits(standin::to_half<7, 127>(v)) {}
    __nv_bfloat16(unsigned int v) : bits(standin::to_half<7, 127>(v)) {}
    __nv_bfloat16(long long v) : bits(standin::to_half<7, 127>((double)v)) {}
    __nv_bfloat16(unsigned long long v) : bits(standin::to_half<7, 127>((double)v)) {}
    operator float() const { return __builtin_bit_cast(float, (unsigned int)bits << 16); }
    operator __nv_bfloat16_raw() const { return {bits}; }
};
typedef __nv_bfloat16 nv_bfloat16;
#define STANDIN_NO_BF16(op) __nv_bfloat16 operator op(__nv_bfloat16, __nv_bfloat16) = delete;
STANDIN_NO_BF16(+) STANDIN_NO_BF16(-) STANDIN_NO_BF16(*) STANDIN_NO_BF16(/)
namespace standin { template <> struct kind<__nv_bfloat16> { static const char value = 'b'; }; }

inline float __bfloat162float(__nv_bfloat16 v) { return (float)v; }
inline __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
inline __nv_bfloat16 __double2bfloat16(double v) { return __nv_bfloat16(v); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return __nv_bfloat16(__nv_bfloat16_raw{v}); }
