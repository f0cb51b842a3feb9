// CUDA C++ on a CPU: what kernels may use, blocks one after the other, the threads of a block as fibers.
// No standard header is reachable, as under NVRTC: INFINITY, uint64_t, std:: and printf do not exist there either.
#pragma once

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 900

struct uint3 { unsigned int x, y, z; };
typedef uint3 dim3;
static thread_local uint3 threadIdx, blockIdx;
static thread_local dim3 blockDim, gridDim;
static const int warpSize = 32;

#include "fibers.h"

#define assert(condition) ((condition) ? (void)0 : standin::fail("assert(" #condition ") failed"))
#define __syncthreads() standin::sync_block(__LINE__)

inline void __syncwarp(unsigned int mask = 0xffffffffu) { standin::sync_warp(mask); }
template <class T> T __shfl_sync(unsigned int mask, T v, int lane, int width = 32) {
    const int own = standin::lane();
    return standin::exchange(mask, v, (own & ~(width - 1)) | (lane & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned int mask, T v, int distance, int width = 32) {
    const int own = standin::lane(), from = own ^ distance;
    return standin::exchange(mask, v, (from & ~(width - 1)) > (own & ~(width - 1)) ? own : from);
}
template <class T> T __shfl_down_sync(unsigned int mask, T v, unsigned int distance, int width = 32) {
    const int own = standin::lane();
    return standin::exchange(mask, v, (own & (width - 1)) + (int)distance >= width ? own : own + (int)distance);
}
template <class T> T __shfl_up_sync(unsigned int mask, T v, unsigned int distance, int width = 32) {
    const int own = standin::lane();
    return standin::exchange(mask, v, (own & (width - 1)) < (int)distance ? own : own - (int)distance);
}
template <class T> inline T __ldg(const T* p) { return *p; }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned int)(((unsigned long long)a * b) >> 32); }
inline unsigned int __float_as_uint(float v) { return __builtin_bit_cast(unsigned int, v); }
inline int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
inline float __uint_as_float(unsigned int v) { return __builtin_bit_cast(float, v); }
inline float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
inline long long __double_as_longlong(double v) { return __builtin_bit_cast(long long, v); }
inline double __longlong_as_double(long long v) { return __builtin_bit_cast(double, v); }
// One thread at a time runs here.
template <class T> T atomicAdd(T* p, T v) {
    const T old = *p;
    *p += v;
    return old;
}
inline int __popc(unsigned int v) { return __builtin_popcount(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline float __double2float_rn(double v) { return (float)v; }
inline float __uint2float_rn(unsigned int v) { return (float)v; }
inline int __float2int_rn(float v) { return (int)__builtin_rintf(v); }

#define STANDIN_MATH1(name)                                  \
    extern "C" float name##f(float) noexcept;                \
    extern "C" double name(double) noexcept;                 \
    inline float name(float v) { return name##f(v); }
STANDIN_MATH1(exp) STANDIN_MATH1(exp2) STANDIN_MATH1(expm1) STANDIN_MATH1(log) STANDIN_MATH1(log2)
STANDIN_MATH1(log10) STANDIN_MATH1(log1p) STANDIN_MATH1(sqrt) STANDIN_MATH1(tanh) STANDIN_MATH1(sinh)
STANDIN_MATH1(cosh) STANDIN_MATH1(sin) STANDIN_MATH1(cos) STANDIN_MATH1(tan) STANDIN_MATH1(erf)
STANDIN_MATH1(fabs) STANDIN_MATH1(floor) STANDIN_MATH1(ceil) STANDIN_MATH1(trunc) STANDIN_MATH1(rint)
STANDIN_MATH1(round) STANDIN_MATH1(cbrt) STANDIN_MATH1(erfc)
#define STANDIN_MATH2(name)                                  \
    extern "C" float name##f(float, float) noexcept;         \
    extern "C" double name(double, double) noexcept;         \
    inline float name(float a, float b) { return name##f(a, b); }
STANDIN_MATH2(pow) STANDIN_MATH2(fmod) STANDIN_MATH2(fmax) STANDIN_MATH2(fmin) STANDIN_MATH2(atan2)
STANDIN_MATH2(copysign)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
extern "C" float ldexpf(float, int) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" void sincosf(float, float*, float*) noexcept;
extern "C" void sincos(double, double*, double*) noexcept;
inline float rsqrtf(float v) { return 1.0f / __builtin_sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / __builtin_sqrt(v); }
inline float rsqrt(float v) { return rsqrtf(v); }
inline bool isnan(float v) { return v != v; }
inline bool isnan(double v) { return v != v; }
inline bool isinf(float v) { return __builtin_isinf(v); }
inline bool isinf(double v) { return __builtin_isinf(v); }
inline bool isfinite(float v) { return __builtin_isfinite(v); }
inline bool isfinite(double v) { return __builtin_isfinite(v); }
inline int abs(int v) { return v < 0 ? -v : v; }
inline long long abs(long long v) { return v < 0 ? -v : v; }
inline float abs(float v) { return __builtin_fabsf(v); }
inline double abs(double v) { return __builtin_fabs(v); }

#define STANDIN_MINMAX(T)                                    \
    inline T min(T a, T b) { return b < a ? b : a; }         \
    inline T max(T a, T b) { return a < b ? b : a; }
STANDIN_MINMAX(int) STANDIN_MINMAX(unsigned int) STANDIN_MINMAX(long) STANDIN_MINMAX(unsigned long)
STANDIN_MINMAX(long long) STANDIN_MINMAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin((double)a, b); }
inline double max(float a, double b) { return fmax((double)a, b); }
inline double min(double a, float b) { return fmin(a, (double)b); }
inline double max(double a, float b) { return fmax(a, (double)b); }
