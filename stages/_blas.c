/* The three BLAS products that MLX's Linux CPU library imports, faster than the reference BLAS that
 * its wheel is linked to. Loaded with RTLD_GLOBAL before mlx (stages/blas.py), so that the dynamic
 * linker binds cblas_sgemm, cblas_dgemm and cblas_cgemm here.
 *
 * Row-major float32 products, which are all that models use, run in kernels of our own, for two reasons.
 * A row of the result has the same bits whatever other rows are computed with it: each output is summed
 * in an order that depends on k alone (stages/_blas_tile.h), so a token of a long prompt chunk equals
 * the same token scored in a verify pass or decoded alone. And with few rows they are faster: a general
 * BLAS first copies ("packs") the whole matrix, which for few rows costs more than the product.
 *
 * Everything else is forwarded to an OpenBLAS found at run time: scipy-openblas32, whose symbols are
 * prefixed `scipy_`, or one with plain names. Without one, plain loops keep it correct.
 *
 * A shared library, not a Python module: no Python headers are needed to build it.
 */
#define _GNU_SOURCE
#include <complex.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <unistd.h>

enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
#define MASKED -3e38f /* MLX masks scores with float32's least finite number, -3.4e38 */
#define INLINE __attribute__((always_inline)) inline
#define UNROLL _Pragma("GCC unroll 16")
#if defined(__clang__) || __GNUC__ >= 12
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int eight_ints __attribute__((vector_size(32), aligned(4), may_alias));

/* C[m,n] = alpha * A[m,k] * (B[n,k]^T or B[k,n]) + beta * C, row-major, leading dimensions in floats. */
typedef struct {
  long m, n, k, lda, ldb, ldc;
  const float *a, *b;
  float *c, alpha, beta;
} Product;

/* Sums of `rows` x `cols` outputs at (i, j), before alpha and beta; rows of `out` are a strip apart. */
typedef void Tile(int rows, int cols, const Product *g, long i, long j, float *out);

/* A tile of a wide NT product: packed rows of A against a block of packed columns of B, over a block
 * of k. Strips of B have four columns and lie `stride` floats apart. */
typedef struct {
  long strips, stride, steps, step; /* vectors of k; floats from one row of `out` to the next */
  const float *a, *b;
  float *chains, *out; /* of all strips, between blocks of k; sums, after the last one */
  int first, last;
} Panel;

/* How a vector of `size` numbers lies in a row of octets: codes of `bits` bits end to end, the lowest
 * first, to a whole float; then, as floats, a scale for each `group` of numbers and perhaps a bias.
 * A code stands for itself or, with `levels`, for one of these. */
typedef struct {
  int bits, biased;
  long size, group;
  const float *levels;
} Codes;

typedef struct {
  const char *name;
  int lanes, rows; /* floats a vector, most rows a tile */
  Tile *dot, *sum;
  void (*pack)(int rows, int of, long k, const float *from, long ld, float *to);
  void (*panel)(int rows, const Panel *w);
  float (*soften)(long k, float scale, const float *from, float *to);
  void (*spell)(const Codes *w, long rows, const float *from, long ld, float *to, long step);
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
#define KERNELS &kernels_avx512, &kernels_avx2, &kernels_generic
#else
#define MAXM 6
#define KERNELS &kernels_generic
#endif
#define LANES 4
#define FN(x) x##_generic
#define LABEL "generic"
#define TARGET
#include "_blas_tile.h"

enum {
  NARROW_ROWS = 40,  /* up to here operands are read where they lie; packing B begins to pay there */
  NEAR_COLS = 512,   /* longer rows of B[k,n] miss the TLB at each step of k, unless packed */
  SMALL = 4096,      /* floats of B that are as near as any copy would be */
  L1_FLOATS = 7680,  /* of 32 KiB: a tile of A and a strip of B, over a block of k */
};

static struct {
  const Kernels *kernels;
  int threads, forward;
  void *sgemm, *dgemm, *cgemm;
  void (*set_threads)(int);
} state = {.threads = 1};

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

/* For tests: kernels by name; 1 if there are none of that name or this CPU lacks what they need. */
int headrace_blas_use(const char *name) {
  const Kernels *best = best_kernels(), *all[] = {KERNELS};
  int able = 0; /* best first: what comes after the best one works too */
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    able |= all[i] == best;
    if (able && !strcmp(all[i]->name, name)) return state.kernels = all[i], 0;
  }
  return 1;
}

/* Half of L2, within reason: what a block of B may take there. */
static long l2_floats(void) {
  static long floats;
  if (!floats) {
    long half = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    half = sysconf(_SC_LEVEL2_CACHE_SIZE) / 2 / (long)sizeof(float);
#endif
    floats = half < 1 << 15 ? 1 << 15 : half > 1 << 18 ? 1 << 18 : half;
  }
  return floats;
}

static const Kernels *in_use(void) {
  return state.kernels ? state.kernels : (state.kernels = best_kernels());
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

/* For measuring: 1 sends products of more than NARROW_ROWS rows to the library, whose rounding differs. */
void headrace_blas_forward(int on) { state.forward = on; }

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

/* Per-thread memory for packed operands, 64-byte aligned; it is kept, as fresh pages cost more than
 * the packing, and freed with its thread. */
static tss_t scratch_key;
static once_flag scratch_once = ONCE_FLAG_INIT;
static void make_scratch_key(void) { tss_create(&scratch_key, free); }

static float *scratch(long floats) {
  call_once(&scratch_once, make_scratch_key);
  long *held = tss_get(scratch_key);
  if (!held || *held < floats) {
    free(held);
    tss_set(scratch_key, NULL);
    if (posix_memalign((void **)&held, 64, 64 + floats * sizeof(float))) abort();
    *held = floats;
    tss_set(scratch_key, held);
  }
  return (float *)((char *)held + 64);
}

static long up(long x, long unit) { return (x + unit - 1) / unit * unit; }

/* One strip of columns, all rows: split evenly over tiles, which find the strip of B in L1. Tiles of the
 * sum take a whole strip or up to a vector: `padded` columns, of which `cols` are stored. */
static void strip(Tile *tile, const Product *g, long j, int cols, int padded, int step) {
  float out[6 * 4 * 16];
  const long most = in_use()->rows, tiles = (g->m + most - 1) / most;
  for (long t = 0, i = 0; t < tiles; t++) {
    const int rows = (int)(g->m * (t + 1) / tiles - i);
    tile(rows, padded, g, i, j, out);
    store(g, i, j, rows, cols, out, step);
    i += rows;
  }
}

/* A strip of B[k,n], copied together first. */
static void packed_strip(const Product *g, long j, int cols) {
  const int lanes = in_use()->lanes, step = 4 * lanes;
  float *b = scratch(g->k * step);
  for (long p = 0; p < g->k; p++) {
    memcpy(b + p * step, g->b + p * g->ldb + j, cols * sizeof(float));
    memset(b + p * step + cols, 0, (step - cols) * sizeof(float));
  }
  const Product near = {g->m, cols, g->k, g->lda, step, g->ldc, g->a, b, g->c + j, g->alpha, g->beta};
  strip(in_use()->sum, &near, 0, cols, cols > lanes ? step : lanes, step);
}

static void by_strips(const Product *g, int dot) {
  const Kernels *kernels = in_use();
  Tile *tile = dot ? kernels->dot : kernels->sum;
  const int step = dot ? 4 : 4 * kernels->lanes, part = dot ? 1 : kernels->lanes;
  const int far = !dot && (g->n > NEAR_COLS || g->m > NARROW_ROWS) && (g->ldb > step || g->n % part);
  const long whole = g->n / step;
#ifdef _OPENMP
  const int threads = g->n * g->k > 65536 ? state.threads : 1; /* waking others costs microseconds */
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
  for (long s = 0; s < whole; s++)
    far ? packed_strip(g, s * step, step) : strip(tile, g, s * step, step, step, step);
  if (far && whole * step < g->n)
    packed_strip(g, whole * step, g->n - whole * step);
  else
    for (long j = whole * step; j < g->n; j += part) {
      const int cols = g->n - j < part ? g->n - j : part;
      strip(tile, g, j, cols, cols, step);
    }
}

/* Columns [j, stop) of a wide product with B[n,k]: their packed B stays in L2 while tiles of A pass by,
 * each of which stays in L1 while the strips of B pass by. */
static void block(const Product *g, long j, long stop) {
  const Kernels *kernels = in_use();
  const long lanes = kernels->lanes, most = kernels->rows, k = up(g->k, lanes), cols = up(stop - j, 4);
  const long parts = k * (most + 4) / L1_FLOATS + 1, each = up((k + parts - 1) / parts, lanes);
  float *b = scratch(cols * k + most * k + most * cols + (parts > 1 ? most * cols * lanes : 0));
  float *a = b + cols * k, *out = a + most * k, *chains = out + most * cols;
  for (long c = 0; c < cols; c += 4)
    kernels->pack(stop - j - c < 4 ? stop - j - c : 4, 4, g->k, g->b + (j + c) * g->ldb, g->ldb, b + c * k);
  const long tiles = (g->m + most - 1) / most;
  for (long t = 0, i = 0; t < tiles; t++) {
    const int rows = (int)(g->m * (t + 1) / tiles - i);
    kernels->pack(rows, rows, g->k, g->a + i * g->lda, g->lda, a);
    for (long p = 0; p < k; p += each) {
      const long vectors = (k - p < each ? k - p : each) / lanes;
      const Panel w = {cols / 4, 4 * k, vectors, cols, a + p * rows, b + p * 4, chains, out, !p, p + each >= k};
      kernels->panel(rows, &w);
    }
    store(g, i, j, rows, stop - j, out, cols);
    i += rows;
  }
}

static void by_blocks(const Product *g) {
  const long fit = l2_floats() / up(g->k, 16) / 4 * 4;
  const long least = fit < 16 ? 16 : fit, blocks = up((g->n + least - 1) / least, state.threads);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(state.threads) if (state.threads > 1)
#endif
  for (long s = 0; s < blocks; s++) {
    const long from = g->n * s / blocks / 4 * 4;
    const long stop = s + 1 < blocks ? g->n * (s + 1) / blocks / 4 * 4 : g->n;
    if (from < stop) block(g, from, stop);
  }
}

/* Rows [i, i + rows) of C = softmax(scale A) B, for attention: A holds scores, `MASKED` or less where a
 * query may not look. What is masked before a row's first open position and after its last one takes
 * no part, in time or in bits: the row is the same however many positions stand around it. */
static void attend(const Product *g, float scale, long i, int rows) {
  const Kernels *kernels = in_use();
  const long ld = g->k + kernels->lanes;
  float *weights = malloc(rows * ld * sizeof(float)), sums[6];
  long first[6], stop[6], low = g->k, high = 0;
  if (!weights) abort();
  for (int r = 0; r < rows; r++) {
    const float *scores = g->a + (i + r) * g->lda;
    for (first[r] = 0; first[r] < g->k && scores[first[r]] <= MASKED; first[r]++);
    for (stop[r] = g->k; stop[r] > first[r] && scores[stop[r] - 1] <= MASKED; stop[r]--);
    if (first[r] == g->k) first[r] = 0, stop[r] = g->k; /* nothing is open: all weigh the same, as in MLX */
    low = first[r] < low ? first[r] : low, high = stop[r] > high ? stop[r] : high;
  }
  for (int r = 0; r < rows; r++) {
    float *to = weights + r * ld;
    memset(to + low, 0, (high - low) * sizeof(float));
    sums[r] = kernels->soften(stop[r] - first[r], scale, g->a + (i + r) * g->lda + first[r], to + first[r]);
  }
  const Product values = {rows, g->n, high - low, ld, g->ldb, g->ldc, weights + low, g->b + low * g->ldb,
                          g->c + i * g->ldc, 1, 0};
  by_strips(&values, 0);
  for (int r = 0; r < rows; r++)
    for (long x = 0; x < g->n; x++) values.c[r * g->ldc + x] /= sums[r];
  free(weights);
}

static void by_rows(const Product *g, float scale) {
  const long most = in_use()->rows, tiles = (g->m + most - 1) / most;
#ifdef _OPENMP
  const int threads = g->m * g->k > 4096 ? state.threads : 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
  for (long t = 0; t < tiles; t++)
    attend(g, scale, g->m * t / tiles, (int)(g->m * (t + 1) / tiles - g->m * t / tiles));
}

/* C = the vectors that the rows of A stand for, whose bytes are codes. B says how: bits, group, how many
 * levels follow (none: codes are numbers, and there are biases), and these. */
static void spell_out(const Product *g) {
  const int levels = (int)g->b[2];
  const Codes w = {(int)g->b[0], !levels, g->n, (long)g->b[1], levels ? g->b + 3 : NULL};
  const int threads = g->m * g->n > 32768 ? state.threads : 1;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
  for (int t = 0; t < threads; t++) {
    const long from = g->m * t / threads, stop = g->m * (t + 1) / threads;
    in_use()->spell(&w, stop - from, g->a + from * g->lda, g->lda, g->c + from * g->ldc, g->ldc);
  }
}

/* The transpose of `rows` x `cols` floats; to be freed. */
static float *transpose(long rows, long cols, const float *from, long ld) {
  float *to = malloc((rows * cols + 1) * sizeof(float));
  if (!to) abort();
  for (long r = 0; r < rows; r++)
    for (long c = 0; c < cols; c++) to[c * rows + r] = from[r * ld + c];
  return to;
}

/* `at`: A comes as its transpose, [k,m]; `bt`: B comes as its transpose, [n,k]. */
static void product(Product g, int at, int bt) {
  const int softmax = isnan(g.alpha) && g.beta > 0, codes = isnan(g.alpha) && !softmax;
  float *a = NULL, *b = NULL;
  if (at) g.a = a = transpose(g.k, g.m, g.a, g.lda), g.lda = g.k;
  if ((softmax || codes) && bt) g.b = b = transpose(g.n, g.k, g.b, g.ldb), g.ldb = g.n;
  if (!softmax && !codes && g.n == 1 && g.ldb == 1) bt = 1, g.ldb = g.k; /* one key: MLX may call its row a column */
  if (softmax) by_rows(&g, g.beta);
  else if (codes) spell_out(&g);
  else if (bt && g.m > NARROW_ROWS && g.n * g.k > SMALL) by_blocks(&g);
  else by_strips(&g, bt);
  free(a), free(b);
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

/* MLX has no door for kernels of others on a Linux CPU, but it passes `alpha` and `beta` of mx.addmm on to
 * here. Nobody wants a product times NaN, so alpha = NaN asks for softmax(beta A) B instead or, with beta = -1, for
 * the vectors that A holds as codes. */
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  if (order == ROW_MAJOR && (isnan(alpha) || !(state.forward && state.sgemm && m > NARROW_ROWS))) {
    const Product g = {m, n, k, lda, ldb, ldc, a, b, c, alpha, beta};
    product(g, ta != PLAIN, tb != PLAIN);
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
