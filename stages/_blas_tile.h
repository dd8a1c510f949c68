/* The kernels, written once and included by _blas.c for every vector width.
 *
 * Before inclusion: LANES floats a vector, MAXM <= 6 rows a tile, FN(name) a name suffix, TARGET the
 * instruction set. Every output is summed in one order that depends on k alone, whichever tile
 * computes it: one chain of fused additions a lane over k, then a fixed tree (B[n,k]), or one chain
 * over k (B[k,n]). So a row of a product is the same to the last bit whether it is computed alone or
 * together with any number of others. What is added for padding, 0 * 0 or 0 * x, changes no sum.
 */

typedef float FN(vec) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int FN(ints) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* The tree: the upper half of the lanes is added to the lower one until four are left, then 0 to 2 and
 * 1 to 3, then those two. */
INLINE TARGET static float FN(fold)(FN(vec) s) {
  union { FN(vec) v; quad q[LANES / 4]; } u = {s};
  UNROLL for (int h = LANES / 8; h; h /= 2) UNROLL for (int l = 0; l < h; l++) u.q[l] += u.q[l + h];
  return (u.q[0][0] + u.q[0][2]) + (u.q[0][1] + u.q[0][3]);
}

/* The same tree for four outputs at once. Each addition takes one shuffle and one blend (which has
 * more ports), since it does not matter which of two lanes the sum is in. */
INLINE TARGET static void FN(fold4)(const FN(vec) s[4], float *out) {
#if LANES == 16 && defined(MIX)
  const FN(vec) t = MIX(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
                    MIX(s[0], s[1], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  const FN(vec) u = MIX(s[2], s[3], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
                    MIX(s[2], s[3], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  FN(vec) w = MIX(t, u, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
              MIX(t, u, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  w += MIX(w, w, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  w += MIX(w, w, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  w = MIX(w, w, 0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12);
  memcpy(out, &w, 4 * sizeof(float));
#elif LANES == 8 && defined(MIX)
  const FN(vec) t = MIX(s[0], s[1], 0, 1, 2, 3, 12, 13, 14, 15) + MIX(s[0], s[1], 4, 5, 6, 7, 8, 9, 10, 11);
  const FN(vec) u = MIX(s[2], s[3], 0, 1, 2, 3, 12, 13, 14, 15) + MIX(s[2], s[3], 4, 5, 6, 7, 8, 9, 10, 11);
  FN(vec) w = MIX(t, u, 0, 1, 10, 11, 4, 5, 14, 15) + MIX(t, u, 2, 3, 8, 9, 6, 7, 12, 13);
  w += MIX(w, w, 1, 0, 3, 2, 5, 4, 7, 6);
  w = MIX(w, w, 0, 4, 2, 6, 0, 4, 2, 6);
  memcpy(out, &w, 4 * sizeof(float));
#elif LANES == 4 && defined(MIX)
  const FN(vec) t = MIX(s[0], s[1], 0, 1, 6, 7) + MIX(s[0], s[1], 2, 3, 4, 5);
  const FN(vec) u = MIX(s[2], s[3], 0, 1, 6, 7) + MIX(s[2], s[3], 2, 3, 4, 5);
  *(FN(vec) *)out = MIX(t, u, 0, 2, 4, 6) + MIX(t, u, 1, 3, 5, 7);
#else
  UNROLL for (int j = 0; j < 4; j++) out[j] = FN(fold)(s[j]);
#endif
}

/* out[i][j] = a_i . b_j for `rows` rows of A and `cols` (4 or 1) rows of B, all of length k. The rows of
 * B come from memory once, for the first tile of a strip, and from L1 for the others; meanwhile the
 * tiles of a strip share the work of fetching the next one: `ahead` points at `fetch` of its rows. */
INLINE TARGET static void FN(dot_tile)(const int rows, const int cols, const int fetch, long k,
                                       const float *a, long lda, const float *b, long ldb,
                                       const float *ahead, float *out) {
  FN(vec) s[6][4] = {{{0}}}, x, y[4];
  long p = 0;
  for (; p + LANES <= k; p += LANES) {
    UNROLL for (int j = 0; j < fetch; j++) __builtin_prefetch(ahead + j * ldb + p, 0, 2);
    UNROLL for (int j = 0; j < cols; j++) y[j] = *(const FN(vec) *)(b + j * ldb + p);
    UNROLL for (int i = 0; i < rows; i++) {
      x = *(const FN(vec) *)(a + i * lda + p);
      UNROLL for (int j = 0; j < cols; j++) s[i][j] += x * y[j];
    }
  }
  if (p < k) {
    float pad[4][LANES] = {{0}}, padx[LANES] = {0};
    UNROLL for (int j = 0; j < cols; j++) memcpy(pad[j], b + j * ldb + p, (k - p) * sizeof(float));
    UNROLL for (int i = 0; i < rows; i++) {
      memcpy(padx, a + i * lda + p, (k - p) * sizeof(float));
      UNROLL for (int j = 0; j < cols; j++) s[i][j] += *(FN(vec) *)padx * *(FN(vec) *)pad[j];
    }
  }
  UNROLL for (int i = 0; i < rows; i++) {
    if (cols == 4) FN(fold4)(s[i], out + i * 4);
    else out[i * 4] = FN(fold)(s[i][0]);
  }
}

/* `rows` rows of k floats, `ld` apart, interleaved by vectors with zeros for those missing `of` a tile: one
 * pointer follows all of them, every load is aligned, and what follows k is zero. */
TARGET static void FN(pack)(int rows, int of, long k, const float *from, long ld, float *to) {
  long p = 0;
  if (rows < of) memset(to, 0, of * ((k + LANES - 1) / LANES * LANES) * sizeof(float));
  for (; p + LANES <= k; p += LANES, to += of * LANES)
    for (int r = 0; r < rows; r++) *(FN(vec) *)(to + r * LANES) = *(const FN(vec) *)(from + r * ld + p);
  if (p == k) return;
  memset(to, 0, of * LANES * sizeof(float));
  for (int r = 0; r < rows; r++) memcpy(to + r * LANES, from + r * ld + p, (k - p) * sizeof(float));
}

/* dot_tile for packed operands and a whole block of columns: the packed rows of A stay in L1 while the
 * block's strips of B pass by. Chains go on from block to block of k: they are set aside in between. */
INLINE TARGET static void FN(panel_tile)(const int rows, const Panel *w) {
  FN(vec) *kept = (FN(vec) *)w->chains;
  for (long strip = 0; strip < w->strips; strip++, kept += rows * 4) {
    const FN(vec) *a = (const FN(vec) *)w->a, *b = (const FN(vec) *)(w->b + strip * w->stride);
    FN(vec) s[6][4] = {{{0}}}, x[6], y;
    if (!w->first)
      UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 4; j++) s[i][j] = kept[i * 4 + j];
    for (long p = 0; p < w->steps; p++, a += rows, b += 4) {
      UNROLL for (int i = 0; i < rows; i++) x[i] = a[i];
      UNROLL for (int j = 0; j < 4; j++) {
        y = b[j];
        UNROLL for (int i = 0; i < rows; i++) s[i][j] += x[i] * y;
      }
    }
    UNROLL for (int i = 0; i < rows; i++) {
      if (w->last) FN(fold4)(s[i], w->out + i * w->step + strip * 4);
      else UNROLL for (int j = 0; j < 4; j++) kept[i * 4 + j] = s[i][j];
    }
  }
}

/* out[i][:] = sum over p of a[i][p] * b[p][:] for a strip of `vecs` vectors; `width` columns are real. */
INLINE TARGET static void FN(sum_tile)(const int rows, const int vecs, long width, long k,
                                       const float *a, long lda, const float *b, long ldb,
                                       float *out) {
  FN(vec) s[6][4] = {{{0}}}, y[4];
  float pad[LANES] = {0};
  for (long p = 0; p < k; p++) {
    UNROLL for (int j = 0; j < vecs; j++) {
      const float *from = b + p * ldb + j * LANES;
      if (width < LANES) from = memcpy(pad, from, width * sizeof(float));
      y[j] = *(const FN(vec) *)from;
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vecs; j++)
      s[i][j] += a[i * lda + p] * y[j];
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vecs; j++)
    *(FN(vec) *)(out + i * 4 * LANES + j * LANES) = s[i][j];
}

/* exp(x) for x <= 0, below -88 exactly 0, to 8e-8: 2^n (1 + r + r^2 p(r)) with p by Cephes' expf. Adding and
 * subtracting 1.5 * 2^23 rounds to an integer, which then lies in the low bits. */
INLINE TARGET static FN(vec) FN(exp)(FN(vec) x) {
  const FN(vec) zero = {0}, least = zero - 88;
  const FN(ints) below = x < least, magic = (FN(ints))(zero + 12582912.0f);
  x = (FN(vec))((below & (FN(ints))least) | (~below & (FN(ints))x));
  const FN(vec) shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const FN(vec) r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  FN(vec) p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 0.5f;
  return (p * (r * r) + r + 1.0f) * (FN(vec))(((FN(ints))shifted - magic + 127) << 23);
}

INLINE TARGET static FN(vec) FN(first)(long k, const float *from, float rest) {
  FN(vec) v = (FN(vec)){0} + rest;
  memcpy(&v, from, k * sizeof(float));
  return v;
}

/* to[p] = exp(scale * (from[p] - the largest)) for p < k, then zeros to a whole vector; the sum of all.
 * Lanes are counted from the row's own first position, so that the order is the row's own too. */
TARGET static float FN(soften)(long k, float scale, const float *from, float *to) {
  FN(vec) sum = {0};
  float most = from[0];
  for (long p = 1; p < k; p++) most = from[p] > most ? from[p] : most;
  for (long p = 0; p < k; p += LANES) {
    const FN(vec) x = k - p >= LANES ? *(const FN(vec) *)(from + p) : FN(first)(k - p, from + p, -INFINITY);
    const FN(vec) e = FN(exp)((x - most) * scale);
    *(FN(vec) *)(to + p) = e;
    sum += e;
  }
  return FN(fold)(sum);
}

/* A row of codes of so many bits as numbers. Eight at a time; beyond the codes there are four bytes or more,
 * so a load may take in some of them. */
INLINE TARGET static void FN(spell_row)(const int bits, const Codes *w, const unsigned char *from, float *to) {
  const long groups = w->size / w->group;
  const float *scales = (const float *)from + (w->size * bits + 31) / 32;
  const eight_ints steps = bits <= 4 ? (eight_ints){0, 1, 2, 3, 4, 5, 6, 7} : (eight_ints){0, 1, 2, 3, 0, 1, 2, 3};
  for (long g = 0; g < groups; g++) {
    const float scale = scales[g], bias = w->biased ? scales[groups + g] : 0;
    if (bits == 8) {
      if (w->levels) for (long e = 0; e < w->group; e++) to[e] = w->levels[from[e]] * scale;
      else for (long e = 0; e < w->group; e++) to[e] = from[e] * scale + bias;
      from += w->group, to += w->group;
      continue;
    }
    for (long e = 0; e < w->group; e += 8, from += bits, to += 8) {
      unsigned low, high;
      memcpy(&low, from, sizeof low);
      memcpy(&high, from + bits / 2, sizeof high);
      const int a = (int)low, b = bits <= 4 ? a : (int)(high >> bits * 4 % 8);
      const eight_ints code = ((eight_ints){a, a, a, a, b, b, b, b} >> steps * bits) & ((1 << bits) - 1);
      eight x;
      if (w->levels)
        UNROLL for (int j = 0; j < 8; j++) x[j] = w->levels[code[j]];
      else
        x = __builtin_convertvector(code, eight);
      *(eight *)to = x * scale + bias;
    }
  }
}

TARGET static void FN(spell)(const Codes *w, long rows, const float *from, long ld, float *to, long step) {
#define SPELL(BITS)                                                                                \
  case BITS:                                                                                       \
    for (long r = 0; r < rows; r++)                                                                \
      FN(spell_row)(BITS, w, (const unsigned char *)(from + r * ld), to + r * step);               \
    break;
  switch (w->bits) { SPELL(1) SPELL(2) SPELL(3) SPELL(4) SPELL(5) SPELL(6) SPELL(7) SPELL(8) }
}

/* A tile of `rows` known to the compiler, so that its accumulators stay in registers. */
#define CASE(R, CALL) case R: if (R <= MAXM) CALL(R); break;
#define CASES(CALL) \
  switch (rows) { CASE(1, CALL) CASE(2, CALL) CASE(3, CALL) CASE(4, CALL) CASE(5, CALL) CASE(6, CALL) }

TARGET static void FN(dot)(int rows, int cols, const Product *g, long i, long j, float *out) {
  const float *a = g->a + i * g->lda, *b = g->b + j * g->ldb;
  const float *next = b + 4 * g->ldb; /* the next strip, fetched by the first tiles of this one */
#define DOT4(R) FN(dot_tile)(R, 4, 4, g->k, a, g->lda, b, g->ldb, next, out)
#define DOT2(R) FN(dot_tile)(R, 4, 2, g->k, a, g->lda, b, g->ldb, next + 4 * i / g->m * g->ldb, out)
#define DOT1(R) FN(dot_tile)(R, 1, 0, g->k, a, g->lda, b, g->ldb, b, out)
  if (cols == 4 && g->m <= MAXM) CASES(DOT4) else if (cols == 4) CASES(DOT2) else CASES(DOT1)
}

TARGET static void FN(sum)(int rows, int cols, const Product *g, long i, long j, float *out) {
  const float *a = g->a + i * g->lda, *b = g->b + j;
#define SUM4(R) FN(sum_tile)(R, 4, LANES, g->k, a, g->lda, b, g->ldb, out)
#define SUM1(R) FN(sum_tile)(R, 1, cols, g->k, a, g->lda, b, g->ldb, out)
  if (cols == 4 * LANES) CASES(SUM4) else CASES(SUM1)
}

TARGET static void FN(panel)(int rows, const Panel *w) {
#define PANEL(R) FN(panel_tile)(R, w)
  CASES(PANEL)
}

static const Kernels FN(kernels) = {LABEL, LANES, MAXM, FN(dot), FN(sum), FN(pack), FN(panel),
                                   FN(soften), FN(spell)};

#undef LANES
#undef MAXM
#undef FN
#undef LABEL
#undef TARGET
#undef CASE
#undef CASES
#undef DOT4
#undef DOT2
#undef DOT1
#undef SUM4
#undef SUM1
#undef PANEL
#undef SPELL
