/* Partial attention and merge for the CPU: AVX-512, bfloat16, or float32 with -DFLOAT32.
 *
 * Two parallel loops replace some thirty operators of the torch executor: every piece of work is
 * one KV head over some blocks of one request's block table, for the query rows of all its
 * readers. The blocks are read once; products accumulate in float32.
 *
 * Per block and head the cache holds K as [head_dim][block_size] and V as
 * [block_size][head_dim] (vLLM's CPU_ATTN, vector kernels). Both are sums over their rows, so
 * one product serves Q K and P V alike, and one packing routine, which float32 does not need.
 *
 * OpenMP comes from the runtime that torch has loaded: two runtimes would compete for the cores.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

/* Element of q, the cache and the result. A product takes 4 bytes of each side at a time: a pair
 * of bfloat16, or one float32. */
#ifdef FLOAT32
typedef float element;
#define PER_STEP 1
#else
typedef uint16_t element;
#define PER_STEP 2
#endif

typedef struct {
  int64_t num_pieces, num_tokens, max_partials;
  int64_t num_kv_heads, gqa_group_size, head_dim, block_size;
  int64_t q_token, q_head, out_token, out_head; /* strides in elements */
  int64_t cache_block, cache_head, v_offset, table_row;
  float sm_scale;
  const element *q, *cache;
  element *out;
  const int32_t *block_table; /* [num_reqs, max_blocks] */
  /* per piece: batch row, first and last token, range of token_of and visible */
  const int32_t *piece_row, *piece_start, *piece_end, *piece_indptr;
  const int32_t *token_of; /* query token of each partial result */
  const int32_t *visible;  /* it sees the tokens of its request below this one */
  const int32_t *merge_slots; /* [num_out_tokens, max_partials], padded with -1 */
  const int32_t *out_tokens;
  float *partial_out, *partial_lse; /* [num_partials, num_qo_heads(, head_dim)] */
  float *out_lse; /* [num_tokens, num_qo_heads], or NULL */
} Work;

/* x + the products of the elements in each 4 bytes of a and b, and rounding to elements. Without
 * AVX-512 BF16 a bfloat16 is widened by shifting it into the upper half of a float. */
#ifdef FLOAT32
static inline element rounded(float x) { return x; }
static inline __m512 add_products(__m512 x, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), x);
}
static inline void store_weights(element *at, __m512 x) { _mm512_storeu_ps(at, x); }
#else
static inline element rounded(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (element)((u >> 16) | 64); /* NaN stays NaN */
  return (element)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
#ifdef __AVX512BF16__
static inline __m512 add_products(__m512 x, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(x, (__m512bh)a, (__m512bh)b);
}
static inline void store_weights(element *at, __m512 x) {
  _mm256_storeu_si256((__m256i *)at, (__m256i)_mm512_cvtneps_pbh(x));
}
#else
static inline __m512 add_products(__m512 x, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  x = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                      _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), x);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                         _mm512_castsi512_ps(_mm512_and_si512(b, high)), x);
}
static inline void store_weights(element *at, __m512 x) { /* x is never NaN */
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16)));
}
#endif
#endif

/* 2^y for y <= 0: 2^n times a polynomial on [-1/2, 1/2], about 1e-7 relative */
static inline __m512 exp2_negative(__m512 y) {
  y = _mm512_max_ps(y, _mm512_set1_ps(-126.0f));
  __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

#ifndef FLOAT32
/* Interleave rows 2i and 2i+1, as vdpbf16ps needs them: dst[rows / 2][cols] pairs, of which the
 * first `used` columns are written. Rows from `valid` on count as zero, whatever lies there. */
static void pack_pairs(const element *src, int rows, int cols, int used, int valid, uint32_t *dst) {
  static const uint16_t low[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                   8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i lo = _mm512_loadu_si512(low);
  const __m512i hi = _mm512_add_epi16(lo, _mm512_set1_epi16(16));
  const __m512i zero = _mm512_setzero_si512();
  for (int r = 0; r < rows; r += 2)
    for (int c = 0; c < used; c += 32) {
      __m512i a = r < valid ? _mm512_loadu_si512(src + (size_t)r * cols + c) : zero;
      __m512i b = r + 1 < valid ? _mm512_loadu_si512(src + (size_t)(r + 1) * cols + c) : zero;
      uint32_t *at = dst + (size_t)(r / 2) * cols + c;
      _mm512_storeu_si512(at, _mm512_permutex2var_epi16(a, lo, b));
      _mm512_storeu_si512(at + 16, _mm512_permutex2var_epi16(a, hi, b));
    }
}

#endif

/* ROWS x used of C (+)= A B: a [.., lda], b [steps][cols] of 4 bytes each, c [.., cols] */
#define DEFINE_PRODUCT(ROWS)                                                                     \
  static inline void product_##ROWS(const element *a, int lda, const uint32_t *b, int steps,     \
                                    int cols, int used, float *c, int add) {                     \
    for (int j = 0; j < used; j += 32) {                                                         \
      __m512 x[ROWS], y[ROWS];                                                                   \
      for (int r = 0; r < ROWS; r++) {                                                           \
        x[r] = add ? _mm512_loadu_ps(c + (size_t)r * cols + j) : _mm512_setzero_ps();            \
        y[r] = add ? _mm512_loadu_ps(c + (size_t)r * cols + j + 16) : _mm512_setzero_ps();       \
      }                                                                                          \
      for (int k = 0; k < steps; k++) {                                                          \
        __m512i u = _mm512_loadu_si512(b + (size_t)k * cols + j);                                \
        __m512i v = _mm512_loadu_si512(b + (size_t)k * cols + j + 16);                           \
        for (int r = 0; r < ROWS; r++) {                                                         \
          int32_t bits;                                                                          \
          memcpy(&bits, a + (size_t)r * lda + PER_STEP * k, 4);                                  \
          __m512i w = _mm512_set1_epi32(bits);                                                   \
          x[r] = add_products(x[r], w, u);                                                       \
          y[r] = add_products(y[r], w, v);                                                       \
        }                                                                                        \
      }                                                                                          \
      for (int r = 0; r < ROWS; r++) {                                                           \
        _mm512_storeu_ps(c + (size_t)r * cols + j, x[r]);                                        \
        _mm512_storeu_ps(c + (size_t)r * cols + j + 16, y[r]);                                   \
      }                                                                                          \
    }                                                                                            \
  }
DEFINE_PRODUCT(8)
DEFINE_PRODUCT(4)

/* The block that comes next, fetched a little with each group of rows: all at once would fill
 * the queue of outstanding loads, and the hardware prefetcher does not follow a block table. */
typedef struct {
  const char *at;
  int64_t left, step; /* bytes */
} Ahead;

static inline void fetch_ahead(Ahead *ahead) {
  int64_t bytes = ahead->left < ahead->step ? ahead->left : ahead->step;
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(ahead->at + i, _MM_HINT_T0);
  ahead->at += bytes;
  ahead->left -= bytes;
}

/* rows is a multiple of 4 */
static void product(const element *a, int lda, const uint32_t *b, int steps, int cols, int used,
                    float *c, int rows, int add, Ahead *ahead) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) {
    fetch_ahead(ahead);
    product_8(a + (size_t)r * lda, lda, b, steps, cols, used, c + (size_t)r * cols, add);
  }
  if (r < rows) {
    fetch_ahead(ahead);
    product_4(a + (size_t)r * lda, lda, b, steps, cols, used, c + (size_t)r * cols, add);
  }
}

typedef struct {
  element *q, *p;
  float *s, *acc, *m, *l;
  uint32_t *k, *v; /* packed pairs; float32 is read where it lies */
} Scratch;

static size_t scratch_bytes(const Work *w, int rows, Scratch *x, char *base) {
  size_t d = w->head_dim, n = w->block_size, at = 0;
#define TAKE(field, bytes)                                                                       \
  x->field = (void *)(base + at);                                                                \
  at += ((size_t)(bytes) + 63) & ~(size_t)63;
  TAKE(q, rows * d * sizeof(element)) TAKE(p, rows * n * sizeof(element)) 
  TAKE(s, rows * n * 4) TAKE(acc, rows * d * 4) TAKE(m, rows * 4) TAKE(l, rows * 4)
#ifndef FLOAT32
  TAKE(k, d / 2 * n * 4) TAKE(v, n / 2 * d * 4)
#endif
#undef TAKE
  return at;
}

/* Online softmax over the first `used` tokens of a block: s holds Q K, becomes the weights in
 * p; acc is rescaled. */
static void softmax_block(const Work *w, const Scratch *x, int first, int used,
                          const int32_t *visible, int rows) {
  const int n = (int)w->block_size, d = (int)w->head_dim, group = (int)w->gqa_group_size;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const float scale2 = w->sm_scale * 1.44269504f; /* scores count in powers of 2 from here on */
  const __m512 hidden = _mm512_set1_ps(-INFINITY);
  for (int r = 0; r < rows; r++) {
    const float *s = x->s + (size_t)r * n;
    int left = visible[r / group] - first; /* tokens of this block that the row sees */
    __m512 top = hidden;
    for (int j = 0; j < used; j += 16) {
      __mmask16 seen = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(left - j));
      top = _mm512_mask_max_ps(top, seen, top, _mm512_loadu_ps(s + j));
    }
    float m = fmaxf(x->m[r], _mm512_reduce_max_ps(top) * scale2);
    element *p = x->p + (size_t)r * n;
    if (m == -INFINITY) { /* nothing seen so far */
      memset(p, 0, (size_t)n * sizeof(element));
      continue;
    }
    __m512 sum = _mm512_setzero_ps(), base = _mm512_set1_ps(m), scale = _mm512_set1_ps(scale2);
    for (int j = 0; j < used; j += 16) {
      __mmask16 seen = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(left - j));
      __m512 e = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(s + j), scale, base));
      e = _mm512_maskz_mov_ps(seen, e);
      sum = _mm512_add_ps(sum, e);
      store_weights(p + j, e);
    }
    if (m != x->m[r]) {
      float shrink = exp2f(x->m[r] - m);
      __m512 f = _mm512_set1_ps(shrink);
      float *acc = x->acc + (size_t)r * d;
      for (int j = 0; j < d; j += 16)
        _mm512_storeu_ps(acc + j, _mm512_mul_ps(_mm512_loadu_ps(acc + j), f));
      x->l[r] *= shrink;
      x->m[r] = m;
    }
    x->l[r] += _mm512_reduce_add_ps(sum);
  }
}

/* Piece `i` for KV head `h`. */
static void attend(const Work *w, int64_t i, int64_t h, const Scratch *x) {
  const int d = (int)w->head_dim, n = (int)w->block_size, group = (int)w->gqa_group_size;
  const int32_t slot = w->piece_indptr[i], tokens = w->piece_indptr[i + 1] - slot;
  const int rows = tokens * group, padded = (rows + 3) & ~3;
  const int start = w->piece_start[i], end = w->piece_end[i];
  for (int r = 0; r < padded; r++) {
    if (r < rows) {
      const element *q = w->q + w->token_of[slot + r / group] * w->q_token +
                      (h * group + r % group) * w->q_head;
      memcpy(x->q + (size_t)r * d, q, (size_t)d * sizeof(element));
    } else {
      memset(x->q + (size_t)r * d, 0, (size_t)d * sizeof(element));
    }
    x->m[r] = -INFINITY;
    x->l[r] = 0.0f;
  }
  memset(x->acc, 0, (size_t)padded * d * 4);
  memset(x->p + (size_t)rows * n, 0, (size_t)(padded - rows) * n * sizeof(element));
  const int32_t *table = w->block_table + w->piece_row[i] * w->table_row;
  for (int t = start; t < end; t += n) {
    const element *block = w->cache + table[t / n] * w->cache_block + h * w->cache_head;
    int valid = end - t < n ? end - t : n;
    Ahead ahead = {NULL, 0, 0};
    if (t + n < end) {
      ahead.at = (const char *)(w->cache + table[t / n + 1] * w->cache_block + h * w->cache_head);
      ahead.left = (w->v_offset + (int64_t)n * d) * (int64_t)sizeof(element); /* K, then V */
      ahead.step = (ahead.left / (2 * ((padded + 7) / 8)) + 63) / 64 * 64;
    }
    const int used = (valid + 31) & ~31;
    if (t == start) { /* nothing was fetched ahead: fetch V while K is packed */
      const char *v = (const char *)(block + w->v_offset);
      for (int64_t j = 0; j < (int64_t)valid * d * (int64_t)sizeof(element); j += 64) _mm_prefetch(v + j, _MM_HINT_T1);
    }
#ifdef FLOAT32
    const uint32_t *keys = (const uint32_t *)block;
    const uint32_t *values = (const uint32_t *)(block + w->v_offset);
    const int steps = valid;
#else
    const uint32_t *keys = x->k, *values = x->v;
    const int steps = used / 2;
    pack_pairs(block, d, n, used, d, x->k);
    pack_pairs(block + w->v_offset, used, d, d, valid, x->v);
#endif
    product(x->q, d, keys, d / PER_STEP, n, used, x->s, padded, 0, &ahead);
    softmax_block(w, x, t, used, w->visible + slot, rows);
    product(x->p, n, values, steps, d, d, x->acc, padded, 1, &ahead);
  }
  const int64_t heads = w->num_kv_heads * group;
  for (int r = 0; r < rows; r++) {
    int64_t at = (slot + r / group) * heads + h * group + r % group;
    float inverse = x->l[r] > 0.0f ? 1.0f / x->l[r] : 0.0f;
    for (int j = 0; j < d; j++) w->partial_out[at * d + j] = x->acc[(size_t)r * d + j] * inverse;
    w->partial_lse[at] = x->m[r] * 0.69314718f + logf(x->l[r]); /* natural logarithm */
  }
}

/* Merge the partial results of one token (POR). */
static void merge(const Work *w, int64_t i) {
  const int64_t heads = w->num_kv_heads * w->gqa_group_size, d = w->head_dim;
  const int32_t *slots = w->merge_slots + i * w->max_partials;
  element *out = w->out + w->out_tokens[i] * w->out_token;
  float sum[1024];
  for (int64_t h = 0; h < heads; h++) {
    float m = -INFINITY, total = 0.0f;
    for (int64_t k = 0; k < w->max_partials && slots[k] >= 0; k++)
      m = fmaxf(m, w->partial_lse[slots[k] * heads + h]);
    memset(sum, 0, (size_t)d * 4);
    for (int64_t k = 0; k < w->max_partials && slots[k] >= 0; k++) {
      float weight = expf(w->partial_lse[slots[k] * heads + h] - m);
      const float *part = w->partial_out + (slots[k] * heads + h) * d;
      total += weight;
      for (int64_t j = 0; j < d; j++) sum[j] += weight * part[j];
    }
    for (int64_t j = 0; j < d; j++) out[h * w->out_head + j] = rounded(sum[j] / total);
    if (w->out_lse) w->out_lse[w->out_tokens[i] * heads + h] = m + logf(total);
  }
}

static int max_rows(const Work *w) {
  int most = 0;
  for (int64_t i = 0; i < w->num_pieces; i++) {
    int rows = (int)((w->piece_indptr[i + 1] - w->piece_indptr[i]) * w->gqa_group_size);
    most = rows > most ? rows : most;
  }
  return (most + 3) & ~3;
}

/* Bytes of scratch memory that each thread needs, a multiple of 64. */
int64_t prefix_share_scratch(const Work *w) {
  Scratch x;
  return (int64_t)scratch_bytes(w, max_rows(w), &x, NULL);
}

/* scratch: num_threads times prefix_share_scratch() bytes. */
void prefix_share_decode(const Work *w, char *scratch, int num_threads) {
  const int most = max_rows(w);
#pragma omp parallel num_threads(num_threads)
  {
    Scratch x;
    const size_t bytes = scratch_bytes(w, most, &x, NULL);
    scratch_bytes(w, most, &x, scratch + bytes * (size_t)omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < w->num_pieces * w->num_kv_heads; i++)
      attend(w, i / w->num_kv_heads, i % w->num_kv_heads, &x);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < w->num_tokens; i++) merge(w, i);
  }
}
