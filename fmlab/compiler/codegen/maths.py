"""Elementary functions for generated code, written so that a compiler can do 8 or 16 at a time.

The C library's exp and erf are calls, one element each, and -ffast-math, which would let the compiler use
vector versions, also lets it assume that there is no NaN and no infinity: wrong for masks of -inf. So fp32
has polynomials of its own, which keep NaN and infinities; fp64, used for proofs, calls the library.

- exp: x = n ln 2 + r, |r| <= ln(2)/2, e^r by its Taylor series to r^7 / 7! (relative error below 2e-7); below
  -87.3 the result is 0 (the library's is a subnormal number), above 88.72283 infinity.
- erf: x P(x^2) / Q(x^2), both of degree 5, fitted for |x| <= 3.93 by least squares whose weights were moved
  towards the largest error; 1 beyond. Absolute error below 5e-7, nearly all of it rounding.
- tanh: (1 - e^-2|x|) / (1 + e^-2|x|), near 0 its Taylor series to x^5; absolute error below 5e-7.
"""

PRELUDE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

static inline float f_abs(float x) { return std::fabs(x); }
static inline double f_abs(double x) { return std::fabs(x); }

static inline float f_exp(float x) {
    float inside = x < -87.3f ? -87.3f : (x > 88.72283f ? 88.72283f : x);
    float n = std::nearbyint(inside * 1.44269504f);
    float r = inside - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t half = (int32_t)n >> 1;  // 2^n in two factors: 2^128 and 2^-127 are no normal numbers
    int32_t first = (half + 127) << 23, second = ((int32_t)n - half + 127) << 23;
    float power, rest;
    std::memcpy(&power, &first, 4);
    std::memcpy(&rest, &second, 4);
    float y = p * power * rest;
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.72283f ? std::numeric_limits<float>::infinity() : y;
    return x != x ? x : y;
}
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
    float e = f_exp(-2.0f * a);
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
    T density = f_exp(x * x * T(-0.5)) * T(0.39894228040143267794);
    return d * (T(0.5) * (T(1) + f_erf(x * T(0.70710678118654752440))) + x * density);
}
template <typename T> static inline T f_gelu_tanh_grad(T d, T x) {
    T inner = T(0.79788456080286535588) * (x + T(0.044715) * x * x * x);
    T slope = T(0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
    T t = f_tanh(inner);
    return d * T(0.5) * (T(1) + t + x * (T(1) - t * t) * slope);
}
"""
