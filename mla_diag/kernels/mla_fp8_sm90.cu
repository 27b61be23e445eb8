// Absorbed multi-head latent attention over a paged FP8 (e4m3) pool, for Hopper (sm_90a).
//
// A pool row is one token: 512 latents that serve as key and as value, then 64 rotary values that only the key has. The
// usual roles of the two operands are swapped: the tensor cores compute S^T = K Q^T and O^T = V^T P^T, so the pool is
// operand A, which wgmma takes from registers, and the heads are the columns. That is what FP8 needs:
//   - a pool byte goes global -> shared -> register, is converted there (exactly, to fp16), and is never stored again;
//   - one conversion serves all heads of the tile, and no row of a tile is padding when there are 16 heads;
//   - what wgmma reads from shared memory, Q and P, is small.
//
// The grid is fixed and its blocks share the work evenly, whatever the lengths: all (request, row tile, KV tile) triples
// are laid end to end and each block takes one contiguous span. A (request, row tile) that one block covers whole is
// written out at once; one that is split over blocks leaves partial results, which mla_combine joins.
//
// Built once per tile shape: ROWS query rows (token x head) by 64 tokens, WARPGROUPS warpgroups, STAGES tiles of the pool
// in flight, BLOCKS blocks on a multiprocessor. See mla_fp8_sm90.py for the choices and docs/kernel-log.md for the reasons.
#include "sm90_ptx.cuh"

#if !defined(ROWS) || !defined(WARPGROUPS) || !defined(STAGES) || !defined(BLOCKS) || !defined(SHARED_BYTES)
#error "define ROWS, WARPGROUPS, STAGES, BLOCKS and SHARED_BYTES"
#endif

constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int TOKENS = 64;                                // of one KV tile: the 64 rows of one wgmma
constexpr int THREADS = 128 * WARPGROUPS, WARPS = THREADS / 32;
constexpr int STRIDE = WIDTH + 32;                        // of a pool row in shared memory: see `shuffled`
constexpr int COLUMN_BLOCKS = ROWS / 8;                   // of a wgmma's columns, which are the tile's query rows
constexpr int LATENT_BLOCKS = LATENT / 64 / WARPGROUPS;   // of 64 latents, for each warpgroup
constexpr int OWNED_BLOCKS = COLUMN_BLOCKS / WARPGROUPS;  // of score columns that one warpgroup turns into probabilities
constexpr int EXCHANGED = WARPGROUPS == 1 ? 1 : 128 * OWNED_BLOCKS;
constexpr int COPIES = 2 / WARPGROUPS;                    // pool rows of a tile that one thread copies a quarter of
constexpr float LOG2E = 1.4426950408889634f, NEVER = -1e30f;
constexpr float HEADROOM = 8.f;                           // probabilities may reach 2^8 before the maximum is raised

struct Params {
  const unsigned short *q_nope, *q_rope;  // bf16 or fp16
  const unsigned char* pool;
  unsigned short* out;  // [tokens, heads, 512], of the query's type
  float* lse;           // [tokens, heads], natural logarithm; may be null
  float* partial;       // [2 * blocks, ROWS, 512], normalised
  float* partial_lse;   // [2 * blocks, ROWS], base 2
  int* first_tile;      // [batch + 1], the place of each request in the row of all tiles
  const int *qo_indptr, *kv_indptr, *kv_lens, *pages;
  i64 q_nope_token, q_nope_head, q_rope_token, q_rope_head, pool_row, pages_row;  // strides, in elements
  int batch, heads, page_size, causal, is_fp16, blocks;
  float score_scale, value_scale;
};

struct Request {
  int first_token, tokens, kv_len;
  const int* pages;

  __device__ int row_tiles(int heads) const { return (tokens * heads + ROWS - 1) / ROWS; }
  __device__ int kv_tiles() const { return (kv_len + TOKENS - 1) / TOKENS; }
};

__device__ inline Request load_request(const Params& p, int request) {
  Request r;
  r.first_token = p.qo_indptr ? p.qo_indptr[request] : request;
  r.tokens = p.qo_indptr ? p.qo_indptr[request + 1] - r.first_token : 1;
  const i64 start = p.kv_indptr ? p.kv_indptr[request] : request * p.pages_row;
  r.kv_len = p.kv_lens ? p.kv_lens[request] : p.kv_indptr[request + 1] - static_cast<int>(start);
  r.pages = p.pages + start;
  return r;
}

struct alignas(128) Shared {
  unsigned char kv[STAGES][TOKENS * STRIDE];
  u32 q[WIDTH / 16][2][COLUMN_BLOCKS][8][4];       // fp16 pairs as wgmma core matrices, see load_query
  u32 p[TOKENS / 8][COLUMN_BLOCKS][8][4];          // the same for the probabilities
  float4 exchange[WARPGROUPS][EXCHANGED];  // scores on their way to the warpgroup that owns their columns
  float warp_value[4][ROWS];                       // one value a column from each warp of a warpgroup
  float column_value[ROWS];
  int warp_sum[WARPS];
  int span_request, span_offset;
  u32 query_max;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch asks for less shared memory than the kernel uses");

// Place -> token within each 8 tokens of a tile. With rows 608 bytes apart (96 mod 128), rows in this order put the eight
// 16-byte words that a quarter of a warp reads, and the four 32-byte runs that half a warp reads, into different banks.
__device__ inline int shuffled(int place) { return 0x57463120 >> (4 * place) & 7; }

// ---- the span of tiles that this block works on ----------------------------------------------------------------------

struct Span {
  int request, offset, tiles;
};

__device__ inline Span find_span(const Params& p, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (p.batch + THREADS - 1) / THREADS;
  const int begin = min(static_cast<int>(threadIdx.x) * each, p.batch), end = min(begin + each, p.batch);
  int own = 0;
  for (int i = begin; i < end; ++i) {
    const Request r = load_request(p, i);
    own += r.row_tiles(p.heads) * r.kv_tiles();
  }
  int upto = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(~0u, upto, distance);
    if (lane >= distance) upto += below;
  }
  if (lane == 31) s.warp_sum[warp] = upto;
  __syncthreads();
  int total = 0, first = upto - own;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) first += s.warp_sum[i];
    total += s.warp_sum[i];
  }
  const int quota = (total + p.blocks - 1) / p.blocks;
  const int start = blockIdx.x * quota;
  for (int i = begin; i < end; ++i) {
    const Request r = load_request(p, i);
    const int tiles = r.row_tiles(p.heads) * r.kv_tiles();
    if (first <= start && start < first + tiles) {
      s.span_request = i;
      s.span_offset = start - first;
    }
    if (blockIdx.x == 0) p.first_tile[i] = first;
    first += tiles;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.first_tile[p.batch] = total;
  __syncthreads();
  return {s.span_request, s.span_offset, max(0, min(quota, total - start))};
}

// ---- operands --------------------------------------------------------------------------------------------------------

// The order of k within a dot product is free, so a thread may hold neighbouring latents of a token, as it reads them:
// 16 bytes (4 k-steps) in the latent part, 8 bytes (2 k-steps) in each half of the rotary part. Q is stored to match.
// Q is scaled by a power of two that brings the tile's largest value near 2^15: a bf16 query may exceed fp16's range.
// Returns the factor that turns a dot product into a base-2 logit.
__device__ inline float load_query(const Params& p, const Request& r, int first_row, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_in_block = lane / 4, quad = lane % 4;
  constexpr int UNITS = 9 * COLUMN_BLOCKS, EACH = (UNITS + WARPS - 1) / WARPS;  // of 8 rows x 64 values
  auto unpack = [&](u32 pair) { return p.is_fp16 ? unpack_f16x2(pair) : unpack_bf16x2(pair); };
  u32 pairs[EACH][8];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int unit = warp + i * WARPS, row = first_row + unit / 9 * 8 + row_in_block, block = unit % 9;
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    if (unit < UNITS && row < r.tokens * p.heads) {
      const int token = r.first_token + row / p.heads, head = row % p.heads;
      const unsigned short* q = block < 8 ? p.q_nope + token * p.q_nope_token + head * p.q_nope_head + 64 * block + 16 * quad
                                          : p.q_rope + token * p.q_rope_token + head * p.q_rope_head + 8 * quad;
      a = *reinterpret_cast<const uint4*>(q);
      b = *reinterpret_cast<const uint4*>(q + (block < 8 ? 8 : 32));
    }
    pairs[i][0] = a.x, pairs[i][1] = a.y, pairs[i][2] = a.z, pairs[i][3] = a.w;
    pairs[i][4] = b.x, pairs[i][5] = b.y, pairs[i][6] = b.z, pairs[i][7] = b.w;
  }
  if (threadIdx.x == 0) s.query_max = 0;
  __syncthreads();
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float2 v = unpack(pairs[i][k]);
      largest = max(largest, max(__float_as_uint(fabsf(v.x)), __float_as_uint(fabsf(v.y))));
    }
  largest = __reduce_max_sync(~0u, largest);
  if (lane == 0) atomicMax(&s.query_max, largest);
  __syncthreads();
  const int exponent = static_cast<int>(s.query_max >> 23) - 127;
  const int shift = exponent == 128 ? 0 : min(14 - exponent, 126);  // an infinite or NaN query stays one
  const float scale = __uint_as_float(static_cast<u32>(127 + shift) << 23);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int unit = warp + i * WARPS;
    if (unit >= UNITS) continue;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float2 v = unpack(pairs[i][k]);
      s.q[unit % 9 * 4 + k / 2][k % 2][unit / 9][row_in_block][quad] = pack_f16x2(v.x * scale, v.y * scale);
    }
  }
  fence_for_tensor_cores();
  return p.score_scale * LOG2E / scale;
}

// The pool rows of tile `tile` that this thread copies a quarter of. Places behind the end repeat the last token, which
// the mask then hides: nothing is read that the request does not own.
__device__ inline void find_rows(const Params& p, const Request& r, int tile, int (&rows)[COPIES]) {
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int place = (threadIdx.x / 32 * COPIES + i) * 8 + shuffled(threadIdx.x % 32 / 4);
    const int token = min(tile * TOKENS + place, r.kv_len - 1);
    rows[i] = p.page_size == 1 ? r.pages[token] : r.pages[token / p.page_size] * p.page_size + token % p.page_size;
  }
}

__device__ inline void copy_rows(const Params& p, const int (&rows)[COPIES], unsigned char* tile) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int place = (threadIdx.x / 32 * COPIES + i) * 8 + shuffled(threadIdx.x % 32 / 4);
    const unsigned char* from = p.pool + rows[i] * p.pool_row + 16 * quad;
    const u32 to = shared_address(tile + place * STRIDE + 16 * quad);
#pragma unroll
    for (int j = 0; j < WIDTH / 64; ++j) copy_async_16(to + 64 * j, from + 64 * j);
  }
}

// ---- one tile --------------------------------------------------------------------------------------------------------

// scores = K Q^T over this warpgroup's share of the key. Rows are places of the tile, columns are query rows.
__device__ inline void score(const Shared& s, const unsigned char* tile, float (&scores)[ROWS / 2]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  constexpr int BLOCKS_64 = 8 / WARPGROUPS, HALVES = 2 / WARPGROUPS;
  const unsigned char* upper = tile + (16 * warp + shuffled(lane / 4)) * STRIDE;
  const unsigned char* lower = upper + 8 * STRIDE;
  const u32 latent = LATENT / WARPGROUPS * group + 16 * (lane % 4), rope = LATENT + 32 * group + 8 * (lane % 4);
  const u32 q = shared_address(&s.q[32 / WARPGROUPS * group]), q_rope = shared_address(&s.q[32 + 2 * group]);
  constexpr u32 STEP = sizeof(s.q[0]);
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) scores[i] = 0.f;
  u32 a[2][4][4];
  auto convert = [](u32 (&step)[4], u32 upper_word, u32 lower_word) {
    step[0] = e4m3x2_lo(upper_word);
    step[1] = e4m3x2_lo(lower_word);
    step[2] = e4m3x2_hi(upper_word);
    step[3] = e4m3x2_hi(lower_word);
  };
  uint4 u = *reinterpret_cast<const uint4*>(upper + latent), v = *reinterpret_cast<const uint4*>(lower + latent);
#pragma unroll
  for (int block = 0; block < BLOCKS_64; ++block) {
    u32(&now)[4][4] = a[block % 2];
    convert(now[0], u.x, v.x);
    convert(now[1], u.y, v.y);
    convert(now[2], u.z, v.z);
    convert(now[3], u.w, v.w);
    if (block + 1 < BLOCKS_64) {
      u = *reinterpret_cast<const uint4*>(upper + latent + 64 * (block + 1));
      v = *reinterpret_cast<const uint4*>(lower + latent + 64 * (block + 1));
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma<0>(scores, now[i], operand_descriptor(q + (4 * block + i) * STEP, COLUMN_BLOCKS));
    wgmma_commit();
    wgmma_wait<1>();
  }
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    u32(&now)[4][4] = a[half % 2];
    const uint2 ur = *reinterpret_cast<const uint2*>(upper + rope + 32 * half);
    const uint2 vr = *reinterpret_cast<const uint2*>(lower + rope + 32 * half);
    convert(now[0], ur.x, vr.x);
    convert(now[1], ur.y, vr.y);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) wgmma<0>(scores, now[i], operand_descriptor(q_rope + (2 * half + i) * STEP, COLUMN_BLOCKS));
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  pin(scores);
}

// acc += V^T P^T over this warpgroup's latents. A thread reads 16 / WARPGROUPS neighbouring latents of four tokens and
// transposes 4 x 4 bytes at a time: latent 2 * b + h of its run is row (lane / 4) + 8 * h of 64-latent block b.
__device__ inline void accumulate(const Shared& s, const unsigned char* tile, float (&acc)[LATENT_BLOCKS][ROWS / 2]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  constexpr int RUN = 16 / WARPGROUPS, WORDS = RUN / 4;
  const unsigned char* column = tile + (LATENT / WARPGROUPS) * group + (LATENT / WARPGROUPS / 4) * warp + RUN * (lane / 4);
  const unsigned char* even = column + shuffled(2 * (lane % 4)) * STRIDE;
  const unsigned char* odd = column + shuffled(2 * (lane % 4) + 1) * STRIDE;
  const u32 p = shared_address(&s.p);
  constexpr u32 STEP = 2 * sizeof(s.p[0]);
  u32 a[2][LATENT_BLOCKS][4];
#pragma unroll
  for (int step = 0; step < TOKENS / 16; ++step) {
    u32(&now)[LATENT_BLOCKS][4] = a[step % 2];
    u32 words[4][WORDS];
    auto read = [&](u32 (&to)[WORDS], const unsigned char* from) {
      if constexpr (WORDS == 4) {
        const uint4 w = *reinterpret_cast<const uint4*>(from);
        to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
      } else {
        const uint2 w = *reinterpret_cast<const uint2*>(from);
        to[0] = w.x, to[1] = w.y;
      }
    };
    read(words[0], even + 16 * step * STRIDE);
    read(words[1], odd + 16 * step * STRIDE);
    read(words[2], even + (16 * step + 8) * STRIDE);
    read(words[3], odd + (16 * step + 8) * STRIDE);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 near = __byte_perm(words[0][i], words[1][i], half ? 0x7362 : 0x5140);
        const u32 far = __byte_perm(words[2][i], words[3][i], half ? 0x7362 : 0x5140);
        now[2 * i + half][0] = e4m3x2_lo(near);
        now[2 * i + half][1] = e4m3x2_hi(near);
        now[2 * i + half][2] = e4m3x2_lo(far);
        now[2 * i + half][3] = e4m3x2_hi(far);
      }
    }
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < LATENT_BLOCKS; ++b) wgmma<1>(acc[b], now[b], operand_descriptor(p + step * STEP, COLUMN_BLOCKS));
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < LATENT_BLOCKS; ++b) pin(acc[b]);
}

// Adds up the warpgroups' shares of the scores; each keeps the columns it owns. With one warpgroup there is nothing to do.
__device__ inline void join_scores(Shared& s, const float (&scores)[ROWS / 2], float (&own)[OWNED_BLOCKS][4]) {
  if constexpr (WARPGROUPS == 1) {
#pragma unroll
    for (int j = 0; j < OWNED_BLOCKS; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) own[j][i] = scores[4 * j + i];
  } else {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    constexpr int HALF = 4 * OWNED_BLOCKS;
#pragma unroll
    for (int j = 0; j < OWNED_BLOCKS; ++j) {
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[j][i] = group ? scores[HALF + 4 * j + i] : scores[4 * j + i];
        other[i] = group ? scores[4 * j + i] : scores[HALF + 4 * j + i];
      }
      s.exchange[group][128 * j + thread] = make_float4(other[0], other[1], other[2], other[3]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OWNED_BLOCKS; ++j) {
      const float4 other = s.exchange[1 - group][128 * j + thread];
      own[j][0] += other.x, own[j][1] += other.y, own[j][2] += other.z, own[j][3] += other.w;
    }
  }
}

// ---- one (request, row tile) over a run of KV tiles ------------------------------------------------------------------

struct Target {
  float *partial, *partial_lse;  // null when the result is final
};

__device__ void attend(const Params& p, const Request& r, int row_tile, int begin, int end, Target target, Shared& s) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;
  const int first_row = row_tile * ROWS, rows = min(ROWS, r.tokens * p.heads - first_row);
  // Query row -> tokens it may see, when causal; all rows of the tile see at least `seen_by_all`.
  auto visible = [&](int row) { return r.kv_len - r.tokens + 1 + min(row / p.heads, r.tokens - 1); };
  const int seen_by_any = p.causal ? visible(first_row + rows - 1) : r.kv_len;
  const int seen_by_all = p.causal ? visible(first_row) : r.kv_len;
  const int tiles = max(0, min(end, (seen_by_any + TOKENS - 1) / TOKENS) - begin);

  int next_rows[COPIES];
  {
    int prologue[STAGES - 1][COPIES];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
      if (i < tiles) find_rows(p, r, begin + i, prologue[i]);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < tiles) copy_rows(p, prologue[i], s.kv[i]);
      copy_async_commit();
    }
    if (STAGES - 1 < tiles) find_rows(p, r, begin + STAGES - 1, next_rows);
  }
  const float scale = load_query(p, r, first_row, s);

  float acc[LATENT_BLOCKS][ROWS / 2];
  float maximum[OWNED_BLOCKS][2], sum[OWNED_BLOCKS][2];
#pragma unroll
  for (int b = 0; b < LATENT_BLOCKS; ++b)
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) acc[b][i] = 0.f;
#pragma unroll
  for (int j = 0; j < OWNED_BLOCKS; ++j) maximum[j][0] = maximum[j][1] = NEVER, sum[j][0] = sum[j][1] = 0.f;

  for (int i = 0; i < tiles; ++i) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();  // the tile is there for all, and all are done with the one before
    if (i + STAGES - 1 < tiles) copy_rows(p, next_rows, s.kv[(i + STAGES - 1) % STAGES]);
    copy_async_commit();
    if (i + STAGES < tiles) find_rows(p, r, begin + i + STAGES, next_rows);

    const unsigned char* tile = s.kv[i % STAGES];
    float own[OWNED_BLOCKS][4];  // places lane / 4 (0, 1) and that + 8 (2, 3), columns 2 * quad (0, 2) and + 1 (1, 3)
    {
      float scores[ROWS / 2];
      score(s, tile, scores);
      join_scores(s, scores, own);
    }
    const int token = (begin + i) * TOKENS + 16 * warp + shuffled(lane / 4);
    const bool masked = (begin + i + 1) * TOKENS > seen_by_all;
    bool exceeded = false;
#pragma unroll
    for (int j = 0; j < OWNED_BLOCKS; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        own[j][e] *= scale, own[j][e + 2] *= scale;
        if (masked) {
          const int row = first_row + 8 * (OWNED_BLOCKS * group + j) + 2 * quad + e;
          const int limit = p.causal ? visible(row) : r.kv_len;
          if (token >= limit) own[j][e] = -infinity();
          if (token + 8 >= limit) own[j][e + 2] = -infinity();
        }
        exceeded |= fmaxf(own[j][e], own[j][e + 2]) > maximum[j][e] + HEADROOM;
      }

    float tile_sum[OWNED_BLOCKS][2];
    auto write_probabilities = [&] {
#pragma unroll
      for (int j = 0; j < OWNED_BLOCKS; ++j) {
        float v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = exp2_approx(own[j][k] - maximum[j][k % 2]);
        tile_sum[j][0] = v[0] + v[2], tile_sum[j][1] = v[1] + v[3];
        s.p[2 * warp][OWNED_BLOCKS * group + j][lane / 4][quad] = pack_f16x2(v[0], v[1]);
        s.p[2 * warp + 1][OWNED_BLOCKS * group + j][lane / 4][quad] = pack_f16x2(v[2], v[3]);
      }
      fence_for_tensor_cores();
    };
    // The maximum is only a reference point: any value that keeps exp2 in fp16's range gives the same result. So it is
    // raised only when a score exceeds it by HEADROOM, which after the first tile is rare and costs no more than a vote.
    write_probabilities();
    if (__syncthreads_or(exceeded)) {
#pragma unroll
      for (int j = 0; j < OWNED_BLOCKS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float largest = fmaxf(own[j][e], own[j][e + 2]);
#pragma unroll
          for (int distance = 4; distance < 32; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
          if (lane / 4 == 0) s.warp_value[warp][8 * (OWNED_BLOCKS * group + j) + 2 * quad + e] = largest;
        }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < OWNED_BLOCKS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * (OWNED_BLOCKS * group + j) + 2 * quad + e;
          float raised = maximum[j][e];
#pragma unroll
          for (int k = 0; k < 4; ++k) raised = fmaxf(raised, s.warp_value[k][column]);
          const float shrink = exp2_approx(maximum[j][e] - raised);
          maximum[j][e] = raised;
          sum[j][e] *= shrink;
          if (warp == 0 && lane / 4 == 0) s.column_value[column] = shrink;
        }
      write_probabilities();
      __syncthreads();
#pragma unroll
      for (int j = 0; j < COLUMN_BLOCKS; ++j) {
        const float2 shrink = *reinterpret_cast<const float2*>(&s.column_value[8 * j + 2 * quad]);
#pragma unroll
        for (int b = 0; b < LATENT_BLOCKS; ++b) {
          acc[b][4 * j] *= shrink.x, acc[b][4 * j + 2] *= shrink.x;
          acc[b][4 * j + 1] *= shrink.y, acc[b][4 * j + 3] *= shrink.y;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < OWNED_BLOCKS; ++j) sum[j][0] += tile_sum[j][0], sum[j][1] += tile_sum[j][1];
    accumulate(s, tile, acc);
  }

  // Normalise. Each column's sum is spread over the lanes of a column and the warps of its warpgroup.
#pragma unroll
  for (int j = 0; j < OWNED_BLOCKS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum[j][e] += __shfl_xor_sync(~0u, sum[j][e], distance);
      if (lane / 4 == 0) s.warp_value[warp][8 * (OWNED_BLOCKS * group + j) + 2 * quad + e] = sum[j][e];
    }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < OWNED_BLOCKS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * (OWNED_BLOCKS * group + j) + 2 * quad + e;
      if (warp != 0 || lane / 4 != 0) continue;
      const float total = s.warp_value[0][column] + s.warp_value[1][column] + s.warp_value[2][column] + s.warp_value[3][column];
      const float lse = total > 0.f ? maximum[j][e] + log2f(total) : total == 0.f ? -infinity() : total;
      s.column_value[column] = total == 0.f ? 0.f : p.value_scale / total;
      if (target.partial)
        target.partial_lse[column] = lse;
      else if (p.lse && column < rows)
        p.lse[static_cast<i64>(r.first_token) * p.heads + first_row + column] = lse / LOG2E;
    }
  __syncthreads();

  constexpr int RUN = 16 / WARPGROUPS;
  const int latent = (LATENT / WARPGROUPS) * group + (LATENT / WARPGROUPS / 4) * warp + RUN * (lane / 4);
#pragma unroll
  for (int j = 0; j < COLUMN_BLOCKS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * j + 2 * quad + e;
      if (column >= rows) continue;
      const float factor = s.column_value[column];
      float v[RUN];
#pragma unroll
      for (int b = 0; b < LATENT_BLOCKS; ++b) v[2 * b] = acc[b][4 * j + e] * factor, v[2 * b + 1] = acc[b][4 * j + 2 + e] * factor;
      if (target.partial) {
        float4* to = reinterpret_cast<float4*>(target.partial + column * LATENT + latent);
#pragma unroll
        for (int k = 0; k < RUN / 4; ++k) to[k] = make_float4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
      } else {
        u32 pairs[RUN / 2];
#pragma unroll
        for (int k = 0; k < RUN / 2; ++k)
          pairs[k] = p.is_fp16 ? pack_f16x2(v[2 * k], v[2 * k + 1]) : pack_bf16x2(v[2 * k], v[2 * k + 1]);
        const i64 row = static_cast<i64>(r.first_token) * p.heads + first_row + column;
        uint4* to = reinterpret_cast<uint4*>(p.out + row * LATENT + latent);
#pragma unroll
        for (int k = 0; k < RUN / 8; ++k) to[k] = make_uint4(pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2], pairs[4 * k + 3]);
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mla_split(const __grid_constant__ Params p) {
  extern __shared__ unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  launch_dependents();
  Span span = find_span(p, s);
  for (bool first = true; span.tiles > 0; ++span.request, span.offset = 0) {
    const Request r = load_request(p, span.request);
    const int kv_tiles = r.kv_tiles(), request_tiles = r.row_tiles(p.heads) * kv_tiles;
    while (span.tiles > 0 && span.offset < request_tiles) {
      const int begin = span.offset % kv_tiles, end = min(kv_tiles, begin + span.tiles);
      const int slot = 2 * blockIdx.x + !first;
      const Target part = {p.partial + static_cast<i64>(slot) * ROWS * LATENT, p.partial_lse + slot * ROWS};
      attend(p, r, span.offset / kv_tiles, begin, end, begin == 0 && end == kv_tiles ? Target{} : part, s);
      span.offset += end - begin, span.tiles -= end - begin;
      first = false;
    }
  }
}

// ---- joining what several blocks computed of one query row -----------------------------------------------------------

// One block for a (token, head) and 512 / gridDim.y latents. Groups of threads take every n-th partial result.
extern "C" __global__ void __launch_bounds__(256) mla_combine(const __grid_constant__ Params p) {
  __shared__ float4 partial_sum[256];
  const int token = blockIdx.x / p.heads, head = blockIdx.x % p.heads, lane = threadIdx.x % 32;
  wait_for_primary();
  int request = token;
  if (p.qo_indptr) {  // the last request that begins at or before this token
    int above = p.batch;
    for (request = 0; above - request > 1;) {
      const int middle = (request + above) / 2;
      (p.qo_indptr[middle] <= token ? request : above) = middle;
    }
  }
  const Request r = load_request(p, request);
  const int row = (token - r.first_token) * p.heads + head, row_in_tile = row % ROWS;
  const int kv_tiles = row < r.tokens * p.heads ? r.kv_tiles() : 0;  // a token of no request gets what an empty one gets
  const int quota = (p.first_tile[p.batch] + p.blocks - 1) / p.blocks;
  const int begin = p.first_tile[request] + row / ROWS * kv_tiles, end = begin + kv_tiles;
  const int first_block = kv_tiles ? begin / quota : 0, parts = kv_tiles ? (end - 1) / quota - first_block + 1 : 0;
  if (parts == 1) return;  // written by its only block
  auto slot = [&](int part) {  // a block's first piece of work lies in its even slot, its last in its odd slot
    const int block = first_block + part;
    return static_cast<i64>(2 * block + (block * quota < begin)) * ROWS + row_in_tile;
  };
  float largest = -infinity();
  for (int i = lane; i < parts; i += 32) largest = fmaxf(largest, p.partial_lse[slot(i)]);
  for (int distance = 16; distance; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
  const float reference = largest == -infinity() ? 0.f : largest;
  float total = 0.f;
  for (int i = lane; i < parts; i += 32) total += exp2f(p.partial_lse[slot(i)] - reference);
  for (int distance = 16; distance; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);

  const int lanes = LATENT / 4 / gridDim.y, groups = 256 / lanes;
  const int latent = blockIdx.y * (LATENT / gridDim.y) + threadIdx.x % lanes * 4;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int i = threadIdx.x / lanes; i < parts; i += groups) {
    const i64 at = slot(i);
    const float weight = exp2f(p.partial_lse[at] - reference);
    const float4 v = *reinterpret_cast<const float4*>(p.partial + at * LATENT + latent);
    sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
  }
  partial_sum[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  for (int g = 1; g < groups; ++g) {
    const float4 v = partial_sum[g * lanes + threadIdx.x];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  const float factor = total == 0.f ? 0.f : 1.f / total;
  const auto pack = [&](float lo, float hi) { return p.is_fp16 ? pack_f16x2(lo * factor, hi * factor) : pack_bf16x2(lo * factor, hi * factor); };
  *reinterpret_cast<uint2*>(p.out + static_cast<i64>(blockIdx.x) * LATENT + latent) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
  if (p.lse && blockIdx.y == 0 && threadIdx.x == 0) p.lse[blockIdx.x] = total == 0.f ? -infinity() : (largest + log2f(total)) / LOG2E;
}
