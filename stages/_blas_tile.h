/* The two narrow products, written once and included by _blas.c for every vector width.
 *
 * Before inclusion: LANES floats a vector, MAXM <= 6 rows a tile, FN(name) a name suffix, TARGET the
 * instruction set. Every output is summed in one order that depends on k alone: one vector
 * accumulator over k, then a fixed tree (NT), or one chain over k (NN). So row i of a product is
 * the same to the last bit whether it is computed alone or together with others, and a token
 * scored in a wide verify pass sees what it would see in a pass of its own.
 */

typedef float FN(vec) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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
#if LANES == 16 && defined(MIX)
    if (cols == 4) { /* the same tree as below, four outputs at once */
      const FN(vec) t = MIX(s[i][0], s[i][1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                        MIX(s[i][0], s[i][1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
      const FN(vec) u = MIX(s[i][2], s[i][3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                        MIX(s[i][2], s[i][3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
      FN(vec) w = MIX(t, u, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  MIX(t, u, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
      w += MIX(w, w, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
      w += MIX(w, w, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
      w = MIX(w, w, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
      memcpy(out + i * 4, &w, 4 * sizeof(float));
      continue;
    }
#endif
    UNROLL for (int j = 0; j < cols; j++) {
      union { FN(vec) v; quad q[LANES / 4]; } u = {s[i][j]};
      UNROLL for (int h = LANES / 8; h; h /= 2) UNROLL for (int l = 0; l < h; l++) u.q[l] += u.q[l + h];
      out[i * 4 + j] = (u.q[0][0] + u.q[0][2]) + (u.q[0][1] + u.q[0][3]);
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

static const Kernels FN(kernels) = {LABEL, LANES, MAXM, FN(dot), FN(sum)};

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
