/* The three BLAS products that MLX's Linux CPU library imports, faster than the reference BLAS that
 * its wheel is linked to. Loaded with RTLD_GLOBAL before mlx (stages/blas.py), so that the dynamic
 * linker binds cblas_sgemm, cblas_dgemm and cblas_cgemm here.
 *
 * Narrow float32 products (a few rows times a weight matrix, attention scores, probabilities times
 * values) run in kernels of our own: a general BLAS first copies ("packs") the whole matrix, which
 * for few rows costs more than the product. Everything else is forwarded to an OpenBLAS found at
 * run time: scipy-openblas32, whose symbols are prefixed `scipy_`, or one with plain names. Without
 * one, plain loops keep it correct. Row-major only takes the fast paths; MLX uses nothing else.
 *
 * A shared library, not a Python module: no Python headers are needed to build it.
 */
#define _GNU_SOURCE
#include <complex.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
#define INLINE __attribute__((always_inline)) inline
#define UNROLL _Pragma("GCC unroll 16")
#if defined(__clang__) || __GNUC__ >= 12
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

/* C[m,n] = alpha * A[m,k] * (B[n,k]^T or B[k,n]) + beta * C, row-major, leading dimensions in floats. */
typedef struct {
  long m, n, k, lda, ldb, ldc;
  const float *a, *b;
  float *c, alpha, beta;
} Product;

/* Sums of `rows` x `cols` outputs at (i, j), before alpha and beta; rows of `out` are a strip apart. */
typedef void Tile(int rows, int cols, const Product *g, long i, long j, float *out);
typedef struct {
  const char *name;
  int lanes, rows; /* floats a vector, most rows a tile */
  Tile *dot, *sum;
} Kernels;

#if defined(__x86_64__)
#define LANES 16
#define MAXM 6 /* 24 accumulators and 5 operands of 32 registers */
#define FN(x) x##_avx512
#define LABEL "avx512"
#define TARGET __attribute__((target("avx512f,fma")))
#include "_blas_tile.h"
#define LANES 8
#define MAXM 3 /* 12 accumulators of 16 registers */
#define FN(x) x##_avx2
#define LABEL "avx2"
#define TARGET __attribute__((target("avx2,fma")))
#include "_blas_tile.h"
#define MAXM 2
#else
#define MAXM 6
#endif
#define LANES 4
#define FN(x) x##_generic
#define LABEL "generic"
#define TARGET
#include "_blas_tile.h"

/* Up to how many rows a product counts as narrow: about where packing begins to pay. Columns of
 * B[k,n] lie n apart, so long rows of B miss the TLB at each step: those are forwarded too. */
static struct {
  const Kernels *kernels;
  int threads;
  long dot_rows, sum_rows, sum_cols;
  void *sgemm, *dgemm, *cgemm;
  void (*set_threads)(int);
} state = {.threads = 1, .dot_rows = 40, .sum_rows = 40, .sum_cols = 512};

static void *symbol(void *library, const char *name) {
  char prefixed[64];
  snprintf(prefixed, sizeof prefixed, "scipy_%s", name);
  void *found = dlsym(library, prefixed);
  return found ? found : dlsym(library, name);
}

static const Kernels *best_kernels(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return &kernels_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
#endif
  return &kernels_generic;
}

/* Forward what is not narrow to the library at `path`; 0 if that worked. */
int headrace_blas_open(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return 1;
  state.sgemm = symbol(library, "cblas_sgemm");
  state.dgemm = symbol(library, "cblas_dgemm");
  state.cgemm = symbol(library, "cblas_cgemm");
  state.set_threads = symbol(library, "openblas_set_num_threads");
  return !(state.sgemm && state.dgemm && state.cgemm);
}

/* Threads of one product, ours and the library's. */
void headrace_blas_threads(int threads) {
  state.threads = threads > 1 ? threads : 1;
  if (state.set_threads) state.set_threads(state.threads);
}

int headrace_blas_get_threads(void) { return state.threads; }
const char *headrace_blas_kernels(void) { return best_kernels()->name; }

/* For measuring: rows up to which a product counts as narrow (0 forwards all). */
void headrace_blas_limits(long dot_rows, long sum_rows) {
  state.dot_rows = dot_rows, state.sum_rows = sum_rows;
}

static void store(const Product *g, long i, long j, int rows, int cols, const float *out, int step) {
  for (int r = 0; r < rows; r++) {
    float *c = g->c + (i + r) * g->ldc + j;
    if (g->alpha == 1 && g->beta == 0)
      memcpy(c, out + r * step, cols * sizeof(float));
    else
      for (int x = 0; x < cols; x++)
        c[x] = g->alpha * out[r * step + x] + (g->beta == 0 ? 0 : g->beta * c[x]);
  }
}

/* One strip of columns, all rows: split evenly over tiles, which find the strip of B in L1. */
static void strip(const Kernels *kernels, Tile *tile, const Product *g, long j, int cols, int step) {
  float out[6 * 4 * 16];
  const long tiles = (g->m + kernels->rows - 1) / kernels->rows;
  for (long t = 0, i = 0; t < tiles; t++) {
    const int rows = (int)(g->m * (t + 1) / tiles - i);
    tile(rows, cols, g, i, j, out);
    store(g, i, j, rows, cols, out, step);
    i += rows;
  }
}

static void narrow(const Product *g, int dot) {
  const Kernels *kernels = state.kernels ? state.kernels : (state.kernels = best_kernels());
  Tile *tile = dot ? kernels->dot : kernels->sum;
  const int step = dot ? 4 : 4 * kernels->lanes, part = dot ? 1 : kernels->lanes;
  const long whole = g->n / step;
#ifdef _OPENMP
  const int threads = g->n * g->k > 65536 ? state.threads : 1; /* waking others costs microseconds */
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
  for (long s = 0; s < whole; s++) strip(kernels, tile, g, s * step, step, step);
  for (long j = whole * step; j < g->n; j += part)
    strip(kernels, tile, g, j, g->n - j < part ? g->n - j : part, step);
}

/* Correct and slow: for when no OpenBLAS was found. */
#define PLAIN_LOOPS(name, type)                                                                    \
  static void name(int order, int ta, int tb, long m, long n, long k, type alpha, const type *a,   \
                   long lda, const type *b, long ldb, type beta, type *c, long ldc) {              \
    const long row = order == ROW_MAJOR;                                                           \
    const long ai = (ta == PLAIN) == row ? lda : 1, ak = lda + 1 - ai;                             \
    const long bk = (tb == PLAIN) == row ? ldb : 1, bj = ldb + 1 - bk;                             \
    const long ci = row ? ldc : 1, cj = ldc + 1 - ci;                                              \
    for (long i = 0; i < m; i++)                                                                   \
      for (long j = 0; j < n; j++) {                                                               \
        type sum = 0, *to = c + i * ci + j * cj;                                                   \
        for (long p = 0; p < k; p++) sum += a[i * ai + p * ak] * b[p * bk + j * bj];               \
        *to = alpha * sum + (beta == 0 ? 0 : beta * *to);                                          \
      }                                                                                            \
  }
PLAIN_LOOPS(plain_s, float)
PLAIN_LOOPS(plain_d, double)
PLAIN_LOOPS(plain_c, float complex)

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  const int dot = tb == TRANSPOSED;
  if (order == ROW_MAJOR && ta == PLAIN &&
      (dot ? m <= state.dot_rows : m <= state.sum_rows && n <= state.sum_cols)) {
    const Product g = {m, n, k, lda, ldb, ldc, a, b, c, alpha, beta};
    narrow(&g, dot);
  } else if (state.sgemm)
    ((void (*)(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
               float *, int))state.sgemm)(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  else
    plain_s(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc) {
  if (state.dgemm)
    ((void (*)(int, int, int, int, int, int, double, const double *, int, const double *, int, double,
               double *, int))state.dgemm)(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  else
    plain_d(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                 int lda, const void *b, int ldb, const void *beta, void *c, int ldc) {
  if (state.cgemm)
    ((void (*)(int, int, int, int, int, int, const void *, const void *, int, const void *, int,
               const void *, void *, int))state.cgemm)(order, ta, tb, m, n, k, alpha, a, lda, b, ldb,
                                                       beta, c, ldc);
  else
    plain_c(order, ta, tb, m, n, k, *(const float complex *)alpha, a, lda, b, ldb,
            *(const float complex *)beta, c, ldc);
}
