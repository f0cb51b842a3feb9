// What the body of an ElementwiseKernel sees: arrays under an index, and CuPy's float16 and bfloat16 classes.
#pragma once
#include "cuda_bf16.h"

#define STANDIN_CUPY_HALF(name, raw)                                              \
    class name {                                                                  \
        raw data_;                                                                \
      public:                                                                     \
        name() {}                                                                 \
        name(float v) : data_(v) {}                                               \
        explicit name(const raw& v) : data_(v) {}                                 \
        explicit name(bool v) : data_((float)v) {}                                \
        explicit name(double v) : data_(v) {}                                     \
        explicit name(int v) : data_((float)v) {}                                 \
        explicit name(unsigned int v) : data_((float)v) {}                        \
        explicit name(long long v) : data_((float)v) {}                           \
        explicit name(unsigned long long v) : data_((float)v) {}                  \
        template <class T, class = decltype(T::other_half((name*)0))>             \
        explicit name(T v) : data_((float)v) {}                                   \
        name(const name&) = default;                                              \
        name& operator=(const name&) = default;                                   \
        template <class T> name& operator=(const T& v) { *this = static_cast<name>(v); return *this; } \
        operator float() const { return (float)data_; }                           \
        unsigned short to_bits() const { return data_.bits; }                     \
        static name from_bits(unsigned short v) { raw r = raw(0.0f); r.bits = v; return name(r); } \
        int isnan() const { return ::isnan((float)data_); }                       \
        int isinf() const { return ::isinf((float)data_); }                       \
        int isfinite() const { return ::isfinite((float)data_); }

class float16;
class bfloat16;
STANDIN_CUPY_HALF(float16, __half)
        static void other_half(bfloat16*);
    };
STANDIN_CUPY_HALF(bfloat16, __nv_bfloat16)
        static void other_half(float16*);
    };
inline float16 min(float16 x, float16 y) { return float16(min((float)x, (float)y)); }
inline float16 max(float16 x, float16 y) { return float16(max((float)x, (float)y)); }
inline bfloat16 min(bfloat16 x, bfloat16 y) { return bfloat16(min((float)x, (float)y)); }
inline bfloat16 max(bfloat16 x, bfloat16 y) { return bfloat16(max((float)x, (float)y)); }
inline int isnan(float16 x) { return x.isnan(); }
inline int isnan(bfloat16 x) { return x.isnan(); }

// Twin: _elementwise.py.
template <class T> struct CArray {
    T* data_;
    ptrdiff_t size_;
    ptrdiff_t ndim_;
    ptrdiff_t contiguous_;
    ptrdiff_t shape_[16];
    ptrdiff_t strides_[16];
    ptrdiff_t size() const { return size_; }
    const ptrdiff_t* shape() const { return shape_; }
    const ptrdiff_t* strides() const { return strides_; }
    T* at(const ptrdiff_t* index) const {
        ptrdiff_t offset = 0;
        for (ptrdiff_t d = 0; d < ndim_; ++d) offset += strides_[d] * index[d];
        return (T*)((char*)data_ + offset);
    }
    T* at(ptrdiff_t i) const {
        if (i < 0 || i >= size_) { standin_out_of_bounds = true; return data_; }
        if (contiguous_) return data_ + i;
        ptrdiff_t offset = 0;
        for (ptrdiff_t d = ndim_ - 1; d >= 0; --d) {
            offset += strides_[d] * (i % shape_[d]);
            i /= shape_[d];
        }
        return (T*)((char*)data_ + offset);
    }
    T& operator[](ptrdiff_t i) { return *at(i); }
    const T& operator[](ptrdiff_t i) const { return *at(i); }
    T& operator[](const ptrdiff_t* index) { return *at(index); }
    const T& operator[](const ptrdiff_t* index) const { return *at(index); }
    static thread_local bool standin_out_of_bounds;
};
template <class T> thread_local bool CArray<T>::standin_out_of_bounds = false;

struct CIndexer {
    ptrdiff_t size_;
    ptrdiff_t ndim;
    ptrdiff_t shape_[16];
    ptrdiff_t index_[16];
    ptrdiff_t size() const { return size_; }
    void set(ptrdiff_t i) {
        if (ndim == 1) { index_[0] = i; return; }
        for (ptrdiff_t d = ndim - 1; d >= 0; --d) {
            index_[d] = i % shape_[d];
            i /= shape_[d];
        }
    }
    const ptrdiff_t* get() const { return index_; }
};
