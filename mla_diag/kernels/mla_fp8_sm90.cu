// Absorbed multi-head latent attention over a paged FP8 (e4m3) pool, for Hopper (sm_90a).
//
// A pool row is one token: 512 latents that serve as key and as value, then 64 rotary values that only the key has. The
// usual roles of the two operands are swapped: the tensor cores compute S^T = K Q^T and O^T = V^T P^T, so the pool is
// operand A, which wgmma takes from registers, and the heads are the columns. That is what FP8 needs:
//   - a pool byte goes global -> shared -> register, is converted there (exactly, to fp16), and is never stored again;
//   - one conversion serves all heads of the tile, and no row of a tile is padding when there are 16 heads;
//   - what wgmma reads from shared memory, Q and P, is small.
//
// A block has a warpgroup that copies pool rows and two that compute. Those two take turns at the scores, one the even
// tiles and one the odd, and each accumulates half of the latents of every tile: while one turns a tile's scores into
// probabilities, the other has the tensor cores for the next tile's scores.
//
// The grid is fixed and its blocks share the work evenly, whatever the lengths: all (request, row tile, KV tile) triples
// are laid end to end and each block takes one contiguous span. A (request, row tile) that one block covers whole is
// written out at once; one that is split over blocks leaves partial results, which mla_combine joins.
//
// Built once per tile shape: ROWS query rows (token x head) by 64 tokens, STAGES tiles of the pool in shared memory,
// BLOCKS blocks on a multiprocessor. See mla_fp8_sm90.py for the choices and docs/kernel-log.md for the reasons.
#include "sm90_ptx.cuh"

#if !defined(ROWS) || !defined(STAGES) || !defined(BLOCKS) || !defined(SHARED_BYTES)
#error "define ROWS, STAGES, BLOCKS and SHARED_BYTES"
#endif
#ifndef BULK
#define BULK 1
#endif

constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int TOKENS = 64;                          // of one KV tile: the 64 rows of one wgmma
constexpr int STRIDE = WIDTH + 32;                  // of a pool row in shared memory: see `shuffled`
constexpr int COLUMNS = ROWS / 8;                   // blocks of 8 columns of a wgmma, which are the tile's query rows
constexpr int LATENT_BLOCKS = LATENT / 2 / 64;      // blocks of 64 latents, for each computing warpgroup
constexpr int COMPUTE_THREADS = 256, COPY_THREADS = 128, THREADS = COMPUTE_THREADS + COPY_THREADS;
constexpr int COPY_REGISTERS = 24, COMPUTE_REGISTERS = BLOCKS == 1 ? 240 : 104;
constexpr float LOG2E = 1.4426950408889634f, NEVER = -1e30f;
constexpr float HEADROOM = 8.f;                     // probabilities may reach 2^8 before the maximum is raised
constexpr int PIECE_COST = 4;                       // what a second piece costs a block, in tiles

struct Params {
  const unsigned short *q_nope, *q_rope;  // bf16 or fp16
  const unsigned char* pool;
  unsigned short* out;  // [tokens, heads, 512], of the query's type
  float* lse;           // [tokens, heads], natural logarithm; may be null
  float* partial;       // [2 * blocks, ROWS, 512], normalised
  float* partial_lse;   // [2 * blocks, ROWS], base 2
  int* schedule;        // [batch + 2]: where each request starts in the row of all tiles; a block's tiles; see Schedule
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
  u32 q[WIDTH / 16][2][COLUMNS][8][4];    // fp16 pairs as wgmma core matrices, see load_query
  u32 p[2][TOKENS / 8][COLUMNS][8][4];    // the same for the probabilities of an even and an odd tile
  float warp_value[COMPUTE_THREADS / 32][ROWS];
  float maximum[ROWS], factor[ROWS];      // of a column: reference point of its exponents; what its accumulators shrink by
  int limit[ROWS];                        // of a column: how many tokens it sees
  u64 full[STAGES], empty[STAGES];
  int3 warp_total[THREADS / 32];
  int span_request, span_offset;
  u32 query_max;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch asks for less shared memory than the kernel uses");

// Place -> token within each 8 tokens of a tile. With rows 608 bytes apart (96 mod 128), rows in this order put the eight
// 16-byte words that a quarter of a warp reads, and the four 32-byte runs that half a warp reads, into different banks.
__device__ inline int shuffled(int place) { return 0x57463120 >> (4 * place) & 7; }

// A position in the ring of tiles in shared memory.
struct Turn {
  int stage = 0;
  u32 phase = 0;

  __device__ Turn next() const { return stage + 1 < STAGES ? Turn{stage + 1, phase} : Turn{0, phase ^ 1}; }
};

// A run of KV tiles of one (request, row tile).
struct Piece {
  Request request;
  int first_row, rows;      // query rows (token x head) of the tile
  int begin, tiles;
  float *partial, *partial_lse;  // null when the piece is the whole

  // The tokens that a query row may see; any row of the tile sees those that its first row sees.
  __device__ int visible(const Params& p, int row) const {
    return p.causal ? request.kv_len - request.tokens + 1 + min(row / p.heads, request.tokens - 1) : request.kv_len;
  }
};

// ---- the span of tiles that this block works on ----------------------------------------------------------------------

// An item is a (request, row tile) with tokens to see. All items are laid end to end and cut every `quota` tiles. Cut
// evenly, most blocks get the end of one item and the start of the next, and pay twice for a query and a result. So when
// lengths are about equal each item is padded to `padded` tiles, a multiple of the quota, and no block gets two.
struct Schedule {
  int quota, padded;

  __device__ Schedule(int blocks, int items, int total, int longest) : quota((total + blocks - 1) / blocks), padded(0) {
    if (items == 0 || items > blocks) return;
    const int parts = blocks / items, whole = (longest + parts - 1) / parts;
    if (whole > quota + PIECE_COST) return;
    quota = whole;
    padded = (longest + whole - 1) / whole * whole;
  }
  __device__ Schedule(const int* stored) : quota(stored[0]), padded(stored[1]) {}
  __device__ int item_tiles(int kv_tiles) const { return kv_tiles && padded ? padded : kv_tiles; }
};

struct Span {
  Schedule schedule;
  int request, offset, tiles;
};

__device__ inline Span find_span(const Params& p, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (p.batch + THREADS - 1) / THREADS;
  const int begin = min(static_cast<int>(threadIdx.x) * each, p.batch), end = min(begin + each, p.batch);
  int items = 0, tiles = 0, longest = 0;
  for (int i = begin; i < end; ++i) {
    const Request r = load_request(p, i);
    const int kv_tiles = r.kv_tiles();
    if (kv_tiles) items += r.row_tiles(p.heads);
    tiles += r.row_tiles(p.heads) * kv_tiles;
    longest = max(longest, kv_tiles);
  }
  int items_upto = items, tiles_upto = tiles;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int items_below = __shfl_up_sync(~0u, items_upto, distance), tiles_below = __shfl_up_sync(~0u, tiles_upto, distance);
    if (lane >= distance) items_upto += items_below, tiles_upto += tiles_below;
  }
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 31) s.warp_total[warp] = {items_upto, tiles_upto, longest};
  __syncthreads();
  int all_items = 0, all_tiles = 0, items_before = items_upto - items, tiles_before = tiles_upto - tiles;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) {
    const int3 total = s.warp_total[i];
    if (i < warp) items_before += total.x, tiles_before += total.y;
    all_items += total.x, all_tiles += total.y, longest = max(longest, total.z);
  }
  const Schedule schedule(p.blocks, all_items, all_tiles, longest);
  const int start = blockIdx.x * schedule.quota, total = schedule.padded ? all_items * schedule.padded : all_tiles;
  int first = schedule.padded ? items_before * schedule.padded : tiles_before;
  for (int i = begin; i < end; ++i) {
    const Request r = load_request(p, i);
    const int next = first + r.row_tiles(p.heads) * schedule.item_tiles(r.kv_tiles());
    if (first <= start && start < next) s.span_request = i, s.span_offset = start - first;
    if (blockIdx.x == 0) p.schedule[i] = first;
    first = next;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.schedule[p.batch] = schedule.quota, p.schedule[p.batch + 1] = schedule.padded;
  __syncthreads();
  return {schedule, s.span_request, s.span_offset, max(0, min(schedule.quota, total - start))};
}

// ---- copying pool rows -----------------------------------------------------------------------------------------------

// The copying warpgroup's part of one piece. Lane pairs of a tile's rows to threads: each of the 4 warps copies 16 rows.
// Places behind the end repeat the last token, which the mask then hides: nothing is read that the request does not own.
__device__ inline Turn copy_piece(const Params& p, const Piece& piece, Turn turn, Shared& s) {
  const int thread = threadIdx.x - COMPUTE_THREADS, lane = thread % 32;
#if BULK
  const int place = thread / 32 * 16 + lane % 16;
#else
  const int place = thread / 32 * 16 + lane / 4;
#endif
  constexpr int EACH = BULK ? 1 : 2;
  // The page is loaded one tile ahead, and nothing is computed from it before its turn: the load's wait is hidden.
  int page[EACH], offset[EACH];
  auto look_up = [&](int tile) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int token = min(tile * TOKENS + place + 8 * i, piece.request.kv_len - 1);
      int slot = token;
      offset[i] = 0;
      if (p.page_size != 1) slot = token / p.page_size, offset[i] = token - slot * p.page_size;
      page[i] = piece.request.pages[slot];
    }
  };
  if (piece.tiles > 0) look_up(piece.begin);
  for (int i = 0; i < piece.tiles; ++i, turn = turn.next()) {
    i64 row[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) row[k] = static_cast<i64>(page[k]) * p.page_size + offset[k];
    if (i + 1 < piece.tiles) look_up(piece.begin + i + 1);
    const u32 full = shared_address(&s.full[turn.stage]);
    barrier_wait(shared_address(&s.empty[turn.stage]), turn.phase ^ 1);
#if BULK
    if (lane == 0) barrier_arrive_expecting(full, 16 * WIDTH);
    __syncwarp();
    if (lane < 16) copy_bulk(shared_address(&s.kv[turn.stage][place * STRIDE]), p.pool + row[0] * p.pool_row, WIDTH, full);
#else
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const unsigned char* from = p.pool + row[k] * p.pool_row + 16 * (lane % 4);
      const u32 to = shared_address(&s.kv[turn.stage][(place + 8 * k) * STRIDE + 16 * (lane % 4)]);
#pragma unroll
      for (int j = 0; j < WIDTH / 64; ++j) copy_async_16(to + 64 * j, from + 64 * j);
    }
    barrier_arrive_after_copies(full);
#endif
  }
  return turn;
}

// ---- operands --------------------------------------------------------------------------------------------------------

// The order of k within a dot product is free, so a thread may hold 16 neighbouring values of a token, as it reads them,
// which are four k-steps. Q is stored to match.
// Q is scaled by a power of two that brings the tile's largest value near 2^15: a bf16 query may exceed fp16's range.
// Returns the factor that turns a dot product into a base-2 logit.
__device__ inline float load_query(const Params& p, const Piece& piece, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_in_block = lane / 4, quad = lane % 4;
  constexpr int UNITS = 9 * COLUMNS, EACH = (UNITS + 7) / 8;  // of 8 rows x 64 values
  auto unpack = [&](u32 pair) { return p.is_fp16 ? unpack_f16x2(pair) : unpack_bf16x2(pair); };
  u32 pairs[EACH][8];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int unit = warp + 8 * i, row = piece.first_row + unit / 9 * 8 + row_in_block, block = unit % 9;
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    if (unit < UNITS && row < piece.first_row + piece.rows) {
      const int token = piece.request.first_token + row / p.heads, head = row % p.heads;
      const unsigned short* q = block < 8 ? p.q_nope + token * p.q_nope_token + head * p.q_nope_head + 64 * block
                                          : p.q_rope + token * p.q_rope_token + head * p.q_rope_head;
      a = *reinterpret_cast<const uint4*>(q + 16 * quad);
      b = *reinterpret_cast<const uint4*>(q + 16 * quad + 8);
    }
    pairs[i][0] = a.x, pairs[i][1] = a.y, pairs[i][2] = a.z, pairs[i][3] = a.w;
    pairs[i][4] = b.x, pairs[i][5] = b.y, pairs[i][6] = b.z, pairs[i][7] = b.w;
  }
  if (threadIdx.x == 0) s.query_max = 0;
  sync_threads<1, COMPUTE_THREADS>();
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
  sync_threads<1, COMPUTE_THREADS>();
  const int exponent = static_cast<int>(s.query_max >> 23) - 127;
  const int shift = exponent == 128 ? 0 : min(14 - exponent, 126);  // an infinite or NaN query stays one
  const float scale = __uint_as_float(static_cast<u32>(127 + shift) << 23);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int unit = warp + 8 * i;
    if (unit >= UNITS) continue;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float2 v = unpack(pairs[i][k]);
      s.q[unit % 9 * 4 + k / 2][k % 2][unit / 9][row_in_block][quad] = pack_f16x2(v.x * scale, v.y * scale);
    }
  }
  fence_for_tensor_cores();
  sync_threads<1, COMPUTE_THREADS>();
  return p.score_scale * LOG2E / scale;
}

// scores = K Q^T. Rows are places of the tile, columns are query rows.
__device__ inline void score(const Shared& s, int stage, float (&scores)[ROWS / 2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const unsigned char* upper = &s.kv[stage][(16 * warp + shuffled(lane / 4)) * STRIDE + 16 * (lane % 4)];
  const unsigned char* lower = upper + 8 * STRIDE;
  const u32 q = shared_address(&s.q);
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) scores[i] = 0.f;
  u32 a[2][2][4];  // one half is being read by the tensor cores while the other is converted
  uint4 u = *reinterpret_cast<const uint4*>(upper), v = *reinterpret_cast<const uint4*>(lower);
#pragma unroll
  for (int pair = 0; pair < WIDTH / 32; ++pair) {
    u32(&now)[2][4] = a[pair % 2];
    const u32 upper_words[2] = {pair % 2 ? u.z : u.x, pair % 2 ? u.w : u.y};
    const u32 lower_words[2] = {pair % 2 ? v.z : v.x, pair % 2 ? v.w : v.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      now[i][0] = e4m3x2_lo(upper_words[i]);
      now[i][1] = e4m3x2_lo(lower_words[i]);
      now[i][2] = e4m3x2_hi(upper_words[i]);
      now[i][3] = e4m3x2_hi(lower_words[i]);
    }
    if (pair % 2 && pair + 1 < WIDTH / 32) {
      u = *reinterpret_cast<const uint4*>(upper + 32 * (pair + 1));
      v = *reinterpret_cast<const uint4*>(lower + 32 * (pair + 1));
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) wgmma<0>(scores, now[i], operand_descriptor(q + (2 * pair + i) * sizeof(s.q[0]), COLUMNS));
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  pin(scores);
}

// One k-step (16 tokens) of V^T for this warpgroup's 256 latents. A thread reads 8 neighbouring latents of four tokens and
// transposes 4 x 4 bytes at a time: latent 2 * b + h of the 8 is row (lane / 4) + 8 * h of 64-latent block b.
struct Values {
  u32 a[LATENT_BLOCKS][4];

  __device__ void load(const Shared& s, int stage, int step) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned char* column = &s.kv[stage][16 * step * STRIDE + 64 * warp + 8 * (lane / 4)];
    const int even = shuffled(2 * (lane % 4)) * STRIDE, odd = shuffled(2 * (lane % 4) + 1) * STRIDE;
    auto read = [&](int at) { return *reinterpret_cast<const uint2*>(column + at); };
    const uint2 words[4] = {read(even), read(odd), read(even + 8 * STRIDE), read(odd + 8 * STRIDE)};
#pragma unroll
    for (int b = 0; b < LATENT_BLOCKS; ++b) {
      auto pair = [&](int first) {
        const uint2 x = words[first], y = words[first + 1];
        return __byte_perm(b < 2 ? x.x : x.y, b < 2 ? y.x : y.y, b % 2 ? 0x7362 : 0x5140);
      };
      const u32 near = pair(0), far = pair(2);
      a[b][0] = e4m3x2_lo(near);
      a[b][1] = e4m3x2_hi(near);
      a[b][2] = e4m3x2_lo(far);
      a[b][3] = e4m3x2_hi(far);
    }
  }
};

// acc += V^T P^T; the tensor cores are still at the last k-steps when this returns. `values[0]` holds the first k-step.
__device__ inline void accumulate(const Shared& s, int stage, const void* probabilities, Values (&values)[2],
                                  float (&acc)[LATENT_BLOCKS][ROWS / 2]) {
  const u32 p = shared_address(probabilities);
#pragma unroll
  for (int step = 0; step < TOKENS / 16; ++step) {
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < LATENT_BLOCKS; ++b)
      wgmma<1>(acc[b], values[step % 2].a[b], operand_descriptor(p + 2 * step * sizeof(s.p[0][0]), COLUMNS));
    wgmma_commit();
    if (step > 0) wgmma_wait<1>();
    if (step + 1 < TOKENS / 16) values[(step + 1) % 2].load(s, stage, step + 1);
  }
}

// ---- computing one piece ---------------------------------------------------------------------------------------------

// Turns this warpgroup's raw scores into probabilities in shared memory and adds them up by column. Returns by how much
// the largest exponent is above the columns' reference points.
__device__ inline float write_probabilities(const float (&scores)[ROWS / 2], float scale, int parity, Shared& s,
                                            float (&sum)[COLUMNS][2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;
  float highest = NEVER;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const float2 maximum = *reinterpret_cast<const float2*>(&s.maximum[8 * j + 2 * quad]);
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = scores[4 * j + k] * scale - (k % 2 ? maximum.y : maximum.x);
      highest = fmaxf(highest, v[k]);
      v[k] = exp2_approx(v[k]);
    }
    sum[j][0] = v[0] + v[2], sum[j][1] = v[1] + v[3];
    s.p[parity][2 * warp][j][lane / 4][quad] = pack_f16x2(v[0], v[1]);
    s.p[parity][2 * warp + 1][j][lane / 4][quad] = pack_f16x2(v[2], v[3]);
  }
  fence_for_tensor_cores();
  return highest;
}

// Raises the columns' reference points to the largest score so far; factor gets what earlier results shrink by.
__device__ inline void raise_maximum(const float (&scores)[ROWS / 2], float scale, Shared& s) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  auto sync_warpgroup = [] { threadIdx.x < 128 ? sync_threads<2, 128>() : sync_threads<3, 128>(); };
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float largest = fmaxf(scores[4 * j + e], scores[4 * j + 2 + e]) * scale;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      if (lane < 4) s.warp_value[warp][8 * j + 2 * lane + e] = largest;
    }
  sync_warpgroup();
  if (thread < ROWS) {
    float raised = s.maximum[thread];
    for (int i = 0; i < 4; ++i) raised = fmaxf(raised, s.warp_value[i][thread]);
    s.factor[thread] = exp2_approx(s.maximum[thread] - raised);
    s.maximum[thread] = raised;
  }
  sync_warpgroup();
}

// Divides by the columns' sums and writes the piece out: to its place in the output, or to the block's partial results.
__device__ inline void write_result(const Params& p, const Piece& piece, const float (&acc)[LATENT_BLOCKS][ROWS / 2],
                                    float (&sum)[COLUMNS][2], Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const i64 row = static_cast<i64>(piece.request.first_token) * p.heads + piece.first_row;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum[j][e] += __shfl_xor_sync(~0u, sum[j][e], distance);
      if (lane < 4) s.warp_value[warp][8 * j + 2 * quad + e] = sum[j][e];
    }
  sync_threads<1, COMPUTE_THREADS>();
  if (threadIdx.x < ROWS) {
    const int column = threadIdx.x;
    float total = 0.f;
    for (int i = 0; i < COMPUTE_THREADS / 32; ++i) total += s.warp_value[i][column];
    const float lse = total == 0.f ? -infinity() : s.maximum[column] + log2f(total);
    s.factor[column] = total == 0.f ? 0.f : p.value_scale / total;
    if (piece.partial)
      piece.partial_lse[column] = lse;
    else if (p.lse && column < piece.rows)
      p.lse[row + column] = lse / LOG2E;
  }
  sync_threads<1, COMPUTE_THREADS>();
  const int latent = 64 * warp + 8 * (lane / 4);
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * j + 2 * quad + e;
      if (column >= piece.rows) continue;
      const float factor = s.factor[column];
      float v[2 * LATENT_BLOCKS];
#pragma unroll
      for (int i = 0; i < 2 * LATENT_BLOCKS; ++i) v[i] = acc[i / 2][4 * j + i % 2 * 2 + e] * factor;
      if (piece.partial) {
        // First all the even fours of latents, then the odd: a store of 8 lanes fills 128 bytes.
        float4* to = reinterpret_cast<float4*>(piece.partial + column * LATENT) + latent / 8;
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[LATENT / 8] = make_float4(v[4], v[5], v[6], v[7]);
      } else {
        auto pack = [&](int i) { return p.is_fp16 ? pack_f16x2(v[i], v[i + 1]) : pack_bf16x2(v[i], v[i + 1]); };
        *reinterpret_cast<uint4*>(p.out + (row + column) * LATENT + latent) = make_uint4(pack(0), pack(2), pack(4), pack(6));
      }
    }
}

// The computing warpgroups' part of one piece.
__device__ inline Turn compute_piece(const Params& p, const Piece& piece, Turn turn, Shared& s) {
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;
  if (threadIdx.x < ROWS) {
    s.maximum[threadIdx.x] = NEVER;
    s.limit[threadIdx.x] = piece.visible(p, piece.first_row + threadIdx.x);
  }
  const float scale = load_query(p, piece, s);
  const int seen_by_all = piece.visible(p, piece.first_row);

  float acc[LATENT_BLOCKS][ROWS / 2], sum[COLUMNS][2], scores[ROWS / 2];
#pragma unroll
  for (int b = 0; b < LATENT_BLOCKS; ++b)
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) acc[b][i] = 0.f;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) sum[j][0] = sum[j][1] = 0.f;

  auto score_tile = [&](int tile, Turn at) {
    barrier_wait(shared_address(&s.full[at.stage]), at.phase);
    score(s, at.stage, scores);
    if ((tile + 1) * TOKENS <= seen_by_all) return;
    const int token = tile * TOKENS + 16 * warp + shuffled(lane / 4);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int2 limit = *reinterpret_cast<const int2*>(&s.limit[8 * j + 2 * quad]);
      if (token >= limit.x) scores[4 * j] = -infinity();
      if (token >= limit.y) scores[4 * j + 1] = -infinity();
      if (token + 8 >= limit.x) scores[4 * j + 2] = -infinity();
      if (token + 8 >= limit.y) scores[4 * j + 3] = -infinity();
    }
  };
  if (group == 0 && piece.tiles > 0) score_tile(piece.begin, turn);
  for (int i = 0; i < piece.tiles; ++i) {
    const bool mine = i % 2 == group;
    const Turn next = turn.next();
    float tile_sum[COLUMNS][2] = {}, highest = NEVER;
    if (mine)
      highest = write_probabilities(scores, scale, i % 2, s, tile_sum);
    else if (i + 1 < piece.tiles)
      score_tile(piece.begin + i + 1, next);
    wgmma_wait<0>();  // of the tile before, which ran on beside the above
#pragma unroll
    for (int b = 0; b < LATENT_BLOCKS; ++b) pin(acc[b]);
    Values values[2];
    barrier_wait(shared_address(&s.full[turn.stage]), turn.phase);
    values[0].load(s, turn.stage, 0);
    // The maximum is only a reference point: any value that keeps exp2 in fp16's range gives the same result. So it is
    // raised only when a score exceeds it by HEADROOM, which after the first tile is rare and costs no more than a vote.
    if (sync_threads_or<1, COMPUTE_THREADS>(highest > HEADROOM)) {
      if (mine) {
        raise_maximum(scores, scale, s);
        write_probabilities(scores, scale, i % 2, s, tile_sum);
      }
      sync_threads<1, COMPUTE_THREADS>();
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(&s.factor[8 * j + 2 * quad]);
        sum[j][0] *= factor.x, sum[j][1] *= factor.y;
#pragma unroll
        for (int b = 0; b < LATENT_BLOCKS; ++b) {
          acc[b][4 * j] *= factor.x, acc[b][4 * j + 2] *= factor.x;
          acc[b][4 * j + 1] *= factor.y, acc[b][4 * j + 3] *= factor.y;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sum[j][0] += tile_sum[j][0], sum[j][1] += tile_sum[j][1];
    accumulate(s, turn.stage, &s.p[i % 2], values, acc);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.empty[turn.stage]));
    turn = next;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < LATENT_BLOCKS; ++b) pin(acc[b]);
  write_result(p, piece, acc, sum, s);
  return turn;
}

// ---- a block's span, piece by piece ----------------------------------------------------------------------------------

template <class Work>
__device__ inline void for_each_piece(const Params& p, Span span, const Work& work) {
  for (bool first = true; span.tiles > 0; ++span.request, span.offset = 0) {
    Piece piece;
    piece.request = load_request(p, span.request);
    const int kv_tiles = piece.request.kv_tiles(), item_tiles = span.schedule.item_tiles(kv_tiles);
    for (; span.tiles > 0 && span.offset < piece.request.row_tiles(p.heads) * item_tiles; first = false) {
      piece.first_row = span.offset / item_tiles * ROWS;
      piece.rows = min(ROWS, piece.request.tokens * p.heads - piece.first_row);
      piece.begin = span.offset % item_tiles;
      const int taken = min(item_tiles - piece.begin, span.tiles), tiles = min(kv_tiles - piece.begin, taken);
      span.offset += taken, span.tiles -= taken;
      if (tiles <= 0) continue;  // padding
      const int seen_by_any = piece.visible(p, piece.first_row + piece.rows - 1);
      piece.tiles = max(0, min(piece.begin + tiles, (seen_by_any + TOKENS - 1) / TOKENS) - piece.begin);
      const int slot = 2 * blockIdx.x + !first;  // a block's first piece and its last may be parts
      piece.partial = tiles == kv_tiles ? nullptr : p.partial + static_cast<i64>(slot) * ROWS * LATENT;
      piece.partial_lse = p.partial_lse + slot * ROWS;
      work(piece);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mla_split(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  launch_dependents();
  if (threadIdx.x < STAGES) {
    barrier_init(shared_address(&s.full[threadIdx.x]), BULK ? COPY_THREADS / 32 : COPY_THREADS);
    barrier_init(shared_address(&s.empty[threadIdx.x]), COMPUTE_THREADS / 32);
    fence_for_tensor_cores();
  }
  const Span span = find_span(p, s);
  Turn turn;
  if (threadIdx.x >= COMPUTE_THREADS) {
    give_registers<COPY_REGISTERS>();
    for_each_piece(p, span, [&](const Piece& piece) { turn = copy_piece(p, piece, turn, s); });
  } else {
    take_registers<COMPUTE_REGISTERS>();
    for_each_piece(p, span, [&](const Piece& piece) { turn = compute_piece(p, piece, turn, s); });
  }
}

// ---- joining what several blocks computed of one query row -----------------------------------------------------------

constexpr int COMBINE_THREADS = 256, BATCH = 4;

// The last request that begins at or before a query token.
__device__ inline int request_of(const Params& p, int token) {
  if (!p.qo_indptr) return token;
  int request = 0;
  for (int above = p.batch; above - request > 1;) {
    const int middle = (request + above) / 2;
    (p.qo_indptr[middle] <= token ? request : above) = middle;
  }
  return request;
}

// A weighted sum of results, each with weight 2^(its lse - reference).
struct Mean {
  float reference = NEVER, total = 0.f;
  float4 sum = {0.f, 0.f, 0.f, 0.f};

  __device__ void add(float other_reference, float other_total, float4 v) {
    const float raised = fmaxf(reference, other_reference);
    const float keep = exp2_approx(reference - raised), take = exp2_approx(other_reference - raised);
    total = total * keep + take * other_total;
    sum.x = sum.x * keep + take * v.x, sum.y = sum.y * keep + take * v.y;
    sum.z = sum.z * keep + take * v.z, sum.w = sum.w * keep + take * v.w;
    reference = raised;
  }
};

// One block for a (token, head) and 512 / gridDim.y latents. Groups of threads take every n-th partial result.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) mla_combine(const __grid_constant__ Params p) {
  __shared__ Mean shared[COMBINE_THREADS];
  const int token = blockIdx.x / p.heads, head = blockIdx.x % p.heads, request = request_of(p, token);
  const Request r = load_request(p, request);
  const int row = (token - r.first_token) * p.heads + head;
  const int kv_tiles = row < r.tokens * p.heads ? r.kv_tiles() : 0;  // a token of no request gets what an empty one gets
  wait_for_primary();
  const Schedule schedule(p.schedule + p.batch);
  const int quota = schedule.quota, begin = p.schedule[request] + row / ROWS * schedule.item_tiles(kv_tiles);
  const int first_block = kv_tiles ? begin / quota : 0, parts = kv_tiles ? (begin + kv_tiles - 1) / quota - first_block + 1 : 0;
  if (parts == 1) return;  // written by its only block

  const int lanes = LATENT / 4 / gridDim.y, groups = COMBINE_THREADS / lanes;
  const int four = blockIdx.y * lanes + threadIdx.x % lanes;  // of the 128 in a row, in the order of write_result
  Mean mean;
  for (int i = threadIdx.x / lanes; i < parts; i += BATCH * groups) {
    float lse[BATCH];
    float4 v[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const int block = first_block + min(i + k * groups, parts - 1);
      // A block's first piece of work is in its even slot, its last in its odd slot.
      const i64 at = static_cast<i64>(2 * block + (block * quota < begin)) * ROWS + row % ROWS;
      lse[k] = i + k * groups < parts ? p.partial_lse[at] : -infinity();
      v[k] = reinterpret_cast<const float4*>(p.partial + at * LATENT)[four];
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) mean.add(lse[k], 1.f, v[k]);
  }
  shared[threadIdx.x] = mean;
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  for (int i = threadIdx.x + lanes; i < COMBINE_THREADS; i += lanes) mean.add(shared[i].reference, shared[i].total, shared[i].sum);
  const float factor = mean.total == 0.f ? 0.f : 1.f / mean.total;
  auto pack = [&](float lo, float hi) {
    return p.is_fp16 ? pack_f16x2(lo * factor, hi * factor) : pack_bf16x2(lo * factor, hi * factor);
  };
  uint2* to = reinterpret_cast<uint2*>(p.out + static_cast<i64>(blockIdx.x) * LATENT + four % 64 * 8 + four / 64 * 4);
  *to = make_uint2(pack(mean.sum.x, mean.sum.y), pack(mean.sum.z, mean.sum.w));
  if (p.lse && blockIdx.y == 0 && threadIdx.x == 0)
    p.lse[blockIdx.x] = mean.total == 0.f ? -infinity() : (mean.reference + log2f(mean.total)) / LOG2E;
}
