"""Elementary functions for generated code, written so that a compiler can do 8 or 16 at a time.

The C library's exp and erf are calls, one element each, and -ffast-math, which would let the compiler use
vector versions, also lets it assume that there is no NaN and no infinity: wrong for masks of -inf. So fp32
has polynomials of its own, which keep NaN and infinities; fp64, used for proofs, calls the library.

- exp: x = n ln 2 + r, |r| <= ln(2)/2, e^r by a polynomial of degree 6, fitted as below (3e-9; with rounding
  the relative error is below 2e-7); below -87.3 the result is 0 (the library's is a subnormal number), above
  88.72283 infinity.
- erf: x P(x^2) / Q(x^2), both of degree 5, fitted for |x| <= 3.93 by least squares whose weights were moved
  towards the largest error; 1 beyond. Absolute error below 5e-7, nearly all of it rounding.
- tanh: (1 - e^-2|x|) / (1 + e^-2|x|), near 0 its Taylor series to x^5; absolute error below 5e-7.

bf16 is the upper half of an fp32 number: widened by a shift, rounded to the nearest, ties to even. fp16 is
the compiler's own type (g++ 12, clang 15), and is in the text only where it is used.
"""

HALF = r"""
typedef _Float16 fp16;
static inline float from_fp16(fp16 x) { return (float)x; }
static inline fp16 to_fp16(float x) { return (fp16)x; }
"""

#: Writes past the caches: what is too large for them would push out what they hold, and a plain store first
#: reads the line that it fills. In place (not `past`) that line is near already. In the text only where used.
STREAM = r"""
#ifdef __SSE2__
#include <immintrin.h>
static inline void f_stream(void* to, const void* from, size_t bytes, bool past) {
    if (!past) {
        std::memcpy(to, from, bytes);
        return;
    }
    char* t = (char*)to;
    const char* f = (const char*)from;
    size_t first = (64 - ((uintptr_t)t & 63)) & 63;  // up to the first whole line
    first = first < bytes ? first : bytes;
    std::memcpy(t, f, first);
    t += first, f += first, bytes -= first;
    for (; bytes >= 64; t += 64, f += 64, bytes -= 64) {
#ifdef __AVX512F__
        _mm512_stream_si512((__m512i*)t, _mm512_loadu_si512((const void*)f));
#else
        for (int k = 0; k < 64; k += 16)
            _mm_stream_si128((__m128i*)(t + k), _mm_loadu_si128((const __m128i*)(f + k)));
#endif
    }
    std::memcpy(t, f, bytes);
}
static inline void f_streamed() { _mm_sfence(); }  // before others read it
#else
static inline void f_stream(void* to, const void* from, size_t bytes, bool) { std::memcpy(to, from, bytes); }
static inline void f_streamed() {}
#endif
"""

PRELUDE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

typedef uint16_t bf16;
static inline float from_bf16(bf16 half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(x != x ? 0x7fc0u : rounded);
}

static inline float f_abs(float x) { return std::fabs(x); }
static inline double f_abs(double x) { return std::fabs(x); }

// x = n ln 2 + r: e^r; n in the lowest bits of `whole`, since numbers near 1.5 * 2^23 are whole
static inline float f_exp_rest(float x, uint32_t& whole) {
    float t = x * 1.44269504f + 12582912.0f;
    float n = t - 12582912.0f;
    std::memcpy(&whole, &t, 4);
    float r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 1.3814583654e-3f;
    p = p * r + 8.3687240258e-3f;
    p = p * r + 4.1668388993e-2f;
    p = p * r + 1.6666521132e-1f;
    p = p * r + 4.9999994040e-1f;
    p = p * r + 1.0f;
    return p * r + 1.0f;
}
static inline float f_exp(float x) {
    uint32_t whole, bits;  // n goes to the exponent's bits: 2^128 is no number, though e^88.7 is one
    float y = f_exp_rest(x, whole);
    std::memcpy(&bits, &y, 4);
    bits += whole << 23;
    std::memcpy(&y, &bits, 4);
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.72283f ? std::numeric_limits<float>::infinity() : y;
    return x != x ? x : y;
}
// for x that is at most 0, or NaN: 2^n is a number, and NaN times it stays NaN
static inline float f_exp_down(float x) {
    uint32_t whole;
    float y = f_exp_rest(x, whole), power;
    whole = (whole << 23) + 0x3f800000u;
    std::memcpy(&power, &whole, 4);
    return x < -87.3f ? 0.0f : y * power;
}
static inline double f_exp_down(double x) { return std::exp(x); }
static inline double f_exp(double x) { return std::exp(x); }

static inline float f_erf(float x) {
    float a = x < -3.93f ? -3.93f : (x > 3.93f ? 3.93f : x);
    float s = a * a;
    float p = 2.02700190e-6f;
    p = p * s + 2.87508273e-4f;
    p = p * s + 3.88443088e-3f;
    p = p * s + 5.31085573e-2f;
    p = p * s + 1.93183371e-1f;
    p = p * s + 1.12837902f;
    float q = 3.79924014e-5f;
    q = q * s + 1.19141180e-3f;
    q = q * s + 1.52046265e-2f;
    q = q * s + 1.15251283e-1f;
    q = q * s + 5.04535913e-1f;
    q = q * s + 1.0f;
    float y = a * p / q;
    return y > 1.0f ? 1.0f : (y < -1.0f ? -1.0f : y);
}
static inline double f_erf(double x) { return std::erf(x); }

static inline float f_tanh(float x) {
    float a = std::fabs(x);
    float e = f_exp_down(-2.0f * a);
    float y = (1.0f - e) / (1.0f + e);
    float s = a * a;
    y = a < 0.1f ? a * (1.0f - s * (0.333333333f - s * 0.133333333f)) : y;
    y = x < 0.0f ? -y : y;
    return x != x ? x : y;
}
static inline double f_tanh(double x) { return std::tanh(x); }

template <typename T> static inline T f_relu(T x) { return x < T(0) ? T(0) : x; }
template <typename T> static inline T f_sigmoid(T x) { return T(1) / (T(1) + f_exp(-x)); }
template <typename T> static inline T f_silu_grad(T d, T x) {
    T s = f_sigmoid(x);
    return d * s * (T(1) + x * (T(1) - s));
}
template <typename T> static inline T f_gelu_grad(T d, T x) {
    T density = f_exp_down(x * x * T(-0.5)) * T(0.39894228040143267794);
    return d * (T(0.5) * (T(1) + f_erf(x * T(0.70710678118654752440))) + x * density);
}
// (1 + tanh(u)) / 2 = 1 / (1 + e^-2u): one exponential and one division
template <typename T> static inline T f_gelu_tanh(T x) {
    T twice = T(-2 * 0.79788456080286535588) * (x + T(0.044715) * x * x * x);
    return x / (T(1) + f_exp(twice));
}
template <typename T> static inline T f_gelu_tanh_grad(T d, T x) {
    T twice = T(-2 * 0.79788456080286535588) * (x + T(0.044715) * x * x * x);
    T slope = T(2 * 0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
    T s = T(1) / (T(1) + f_exp(twice));
    return d * (s + x * s * (T(1) - s) * slope);
}
"""
