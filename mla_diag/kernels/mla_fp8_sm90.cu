// Absorbed multi-head latent attention over a paged FP8 (e4m3) pool, for Hopper (sm_90a).
//
// A pool row is one token: 512 latents that serve as key and as value, then 64 rotary values that only the key has. The
// usual roles of the two operands are swapped: the tensor cores compute S^T = K Q^T and O^T = V^T P^T, so the pool is
// operand A, which wgmma takes from registers, and the heads are the columns. That is what FP8 needs:
//   - a pool byte goes global -> shared -> register, is converted there (exactly, to fp16), and is never stored again;
//   - one conversion serves all heads of the tile, and no row of a tile is padding when there are 16 heads;
//   - what wgmma reads from shared memory, Q and P, is small.
//
// A block, one a multiprocessor, has a warpgroup that copies pool rows and two that compute. Of those, one takes the
// scores of the even tiles and one of the odd, and each accumulates half of the latents of every tile: while one turns
// a tile's scores into probabilities, the other has the tensor cores for the next tile's scores.
//
// The grid is fixed and its blocks share the work, whatever the lengths (mla_fp8_sm90_schedule.cuh): mla_fp8_sm90_plan
// finds each block's part once for all layers of a step, or each block its own. A (request, row tile) that one block
// covers whole is written out at once; of one that is split, each block leaves a partial result, and
// mla_fp8_sm90_combine joins them.
//
// Built once per tile height: ROWS query rows (token x head) by 64 tokens, with STAGES tiles of the pool in shared
// memory. See mla_fp8_sm90.py for the choices and docs/kernel-log.md for the reasons.
#if !defined(ROWS) || !defined(STAGES)
#error "define ROWS and STAGES"
#endif
#include "mla_fp8_sm90_tile.cuh"

// What mla_fp8_sm90.py lays out too.
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch asks for less shared memory than the kernel uses");
static_assert(sizeof(Span) == SPAN_BYTES && sizeof(Params) == PARAMS_BYTES, "the host sees other structures");

constexpr int COPY_REGISTERS = 24, COMPUTE_REGISTERS = 240;  // of a thread; a multiprocessor has 65,536
constexpr float NEVER = -1e30f;                              // below every logit
constexpr float HEADROOM = 8.f;                              // probabilities may reach 2^8 before a maximum is raised

// ---- copying pool rows ----------------------------------------------------------------------------------------------

// The copying warpgroup's part of one piece: each of its warps copies 16 rows of a tile, one a lane. Tokens behind the
// end repeat the last one, which is then masked: nothing is read that the request does not own.
__device__ inline Turn copy_piece(const Params& p, const Piece& piece, Turn turn, Shared& s) {
  const int lane = threadIdx.x % 32, row_of_tile = (threadIdx.x - COMPUTE_THREADS) / 32 * 16 + lane % 16;
  int page = 0, offset = 0;
  // A page is looked up one tile ahead, and nothing is computed from it before its turn: the load's wait is hidden.
  auto look_up = [&](int tile) {
    int slot = min(tile * TOKENS + row_of_tile, piece.request.kv_len - 1);
    if (p.page_size != 1) {
      offset = slot % p.page_size;
      slot /= p.page_size;
    }
    page = p.pages[piece.request.start + slot];
  };
  if (piece.tiles > 0) look_up(piece.begin);
  for (int i = 0; i < piece.tiles; ++i, turn = turn.next()) {
    const i64 row = static_cast<i64>(page) * p.page_size + offset;
    if (i + 1 < piece.tiles) look_up(piece.begin + i + 1);
    const u32 full = shared_address(&s.full[turn.stage]);
    barrier_wait(shared_address(&s.empty[turn.stage]), turn.phase ^ 1);
    if (lane == 0) barrier_arrive_expecting(full, 16 * WIDTH);
    __syncwarp();
    const u32 to = shared_address(&s.kv[turn.stage][row_of_tile * STRIDE]);
    if (lane < 16) copy_bulk(to, p.pool + row * p.pool_row, WIDTH, full);
  }
  return turn;
}

// ---- from scores to probabilities -----------------------------------------------------------------------------------

// Adds `values` over the 8 lanes that differ in bits 2 to 4, and shares the sums out: of 2 * COLUMNS values, lane l
// keeps those from (l / 4) * COLUMNS / 4 on. Halving what is exchanged at each step takes a third of the shuffles.
template <int Count, int Distance>
__device__ inline void add_over_lanes(float (&values)[2 * COLUMNS]) {
  if constexpr (Count == 1) {
    values[0] += __shfl_xor_sync(~0u, values[0], Distance);
  } else {
    const bool upper = threadIdx.x & Distance;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float sent = upper ? values[i] : values[i + Count / 2];
      const float kept = upper ? values[i + Count / 2] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, sent, Distance);
    }
  }
  if constexpr (Distance > 4) add_over_lanes<Count == 1 ? 1 : Count / 2, Distance / 2>(values);
}

// The sums of a warp's probabilities by column, each kept by one lane (or two) of the eight that share the column.
struct Sums {
  static constexpr int COUNT = COLUMNS < 4 ? 1 : COLUMNS / 4;
  float value[COUNT] = {};

  __device__ static int column(int i) {
    const int lane = threadIdx.x % 32, index = lane / 4 * COLUMNS / 4 + i;
    return index / 2 * 8 + lane % 4 * 2 + index % 2;
  }
};

// Turns this warpgroup's raw scores into probabilities in shared memory and adds them up by column. Returns by how much
// the largest exponent is above the columns' reference points.
__device__ inline float write_probabilities(const Scores& scores, float scale, Shared& s, Sums& sums) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;
  float highest = NEVER, by_column[2 * COLUMNS];
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const float2 reference = *reinterpret_cast<const float2*>(&s.maximum[8 * j + 2 * quad]);
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = scores[4 * j + k] * scale - (k % 2 ? reference.y : reference.x);
      highest = fmaxf(highest, v[k]);
      v[k] = exp2_approx(v[k]);
    }
    by_column[2 * j] = v[0] + v[2], by_column[2 * j + 1] = v[1] + v[3];
    s.p[group][2 * warp][j][lane / 4][quad] = pack_f16x2(v[0], v[1]);
    s.p[group][2 * warp + 1][j][lane / 4][quad] = pack_f16x2(v[2], v[3]);
  }
  fence_for_engines();
  add_over_lanes<2 * COLUMNS, 16>(by_column);
#pragma unroll
  for (int i = 0; i < Sums::COUNT; ++i) sums.value[i] = by_column[i];
  return highest;
}

// Raises the columns' reference points to the largest score so far; s.factor gets what earlier results shrink by.
__device__ inline void raise_maximum(const Scores& scores, float scale, Shared& s) {
  const int thread = threadIdx.x % 128, warp = threadIdx.x / 32, lane = thread % 32;
  auto sync_warpgroup = [] { threadIdx.x < 128 ? sync_threads<2, 128>() : sync_threads<3, 128>(); };
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float largest = fmaxf(scores[4 * j + e], scores[4 * j + 2 + e]) * scale;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      if (lane < 4) s.warp_value[warp][8 * j + 2 * lane + e] = largest;
    }
  sync_warpgroup();
  if (thread < ROWS) {
    float raised = s.maximum[thread];
    for (int i = 0; i < 4; ++i) raised = fmaxf(raised, s.warp_value[threadIdx.x / 128 * 4 + i][thread]);
    s.factor[thread] = exp2_approx(s.maximum[thread] - raised);
    s.maximum[thread] = raised;
  }
  sync_warpgroup();
}

// Brings results up to now to raised reference points.
__device__ inline void shrink(Accumulators& acc, Sums& sums, const Shared& s) {
#pragma unroll
  for (int k = 0; k < Sums::COUNT; ++k) sums.value[k] *= s.factor[Sums::column(k)];
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(&s.factor[8 * j + threadIdx.x % 4 * 2]);
#pragma unroll
    for (int b = 0; b < LATENT_BLOCKS; ++b) {
      acc[b][4 * j] *= factor.x, acc[b][4 * j + 2] *= factor.x;
      acc[b][4 * j + 1] *= factor.y, acc[b][4 * j + 3] *= factor.y;
    }
  }
}

// Takes out the scores of tokens that a query row may not see, or that are behind the end.
__device__ inline void mask(Scores& scores, int tile, const Shared& s) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int token = tile * TOKENS + 16 * warp + shuffled(lane / 4);
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const int2 limit = *reinterpret_cast<const int2*>(&s.limit[8 * j + lane % 4 * 2]);
    if (token >= limit.x) scores[4 * j] = -infinity();
    if (token >= limit.y) scores[4 * j + 1] = -infinity();
    if (token + 8 >= limit.x) scores[4 * j + 2] = -infinity();
    if (token + 8 >= limit.y) scores[4 * j + 3] = -infinity();
  }
}

// ---- computing one piece --------------------------------------------------------------------------------------------

__device__ inline uint4 pack_eight_f16(const float (&v)[8]) {
  return make_uint4(pack_f16x2(v[0], v[1]), pack_f16x2(v[2], v[3]), pack_f16x2(v[4], v[5]), pack_f16x2(v[6], v[7]));
}

// Writes four neighbouring elements of the output.
__device__ inline void store_four(const Params& p, i64 at, float a, float b, float c, float d) {
  if (p.out_type == FP32)
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(a, b, c, d);
  else
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p.out) + at) =
        p.out_type == FP16 ? make_uint2(pack_f16x2(a, b), pack_f16x2(c, d))
                           : make_uint2(pack_bf16x2(a, b), pack_bf16x2(c, d));
}

// The same, eight.
__device__ inline void store_eight(const Params& p, i64 at, const float (&v)[8]) {
  if (p.out_type == FP32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(p.out) + at);
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(p.out) + at) =
        p.out_type == FP16 ? pack_eight_f16(v)
                           : make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                                        pack_bf16x2(v[6], v[7]));
  }
}

// Divides by the columns' sums and writes the piece out: to its place in the output, or to the partial results.
__device__ inline void write_result(const Params& p, const Piece& piece, const Accumulators& acc, const Sums& sums,
                                    Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const i64 row = static_cast<i64>(piece.request.first_token) * p.heads + piece.first_row;
#pragma unroll
  for (int i = 0; i < Sums::COUNT; ++i) s.warp_value[warp][Sums::column(i)] = sums.value[i];
  sync_threads<1, COMPUTE_THREADS>();
  if (threadIdx.x < ROWS) {
    const int column = threadIdx.x;
    float total = 0.f;
    for (int i = 0; i < COMPUTE_THREADS / 32; ++i) total += s.warp_value[i][column];
    const float lse = total == 0.f ? -infinity() : s.maximum[column] + log2f(total);
    s.factor[column] = total == 0.f ? 0.f : (piece.partial ? 1.f : p.value_scale) / total;
    if (piece.partial)
      piece.partial_lse[column] = lse;
    else if (column < piece.rows)
      p.lse[row + column] = lse * p.lse_scale;
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
      if (piece.partial)
        *reinterpret_cast<uint4*>(piece.partial + column * LATENT + latent) = pack_eight_f16(v);
      else
        store_eight(p, (row + column) * LATENT + latent, v);
    }
}

// The computing warpgroups' part of one piece.
__device__ inline Turn compute_piece(const Params& p, const Piece& piece, Turn turn, Shared& s) {
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  if (threadIdx.x < ROWS) {
    s.maximum[threadIdx.x] = NEVER;
    s.limit[threadIdx.x] = piece.visible(p, piece.first_row + threadIdx.x);
  }
  const float scale = load_query(p, piece, s);
  const int seen_by_all = piece.visible(p, piece.first_row);
  Accumulators acc;
  Scores scores;
  Sums sums;
#pragma unroll
  for (int b = 0; b < LATENT_BLOCKS; ++b)
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) acc[b][i] = 0.f;

  for (int i = -1; i < piece.tiles; ++i) {  // before the first tile there are only its scores to take
    const bool mine = (i & 1) == group;
    const Turn next = i < 0 ? turn : turn.next();
    Sums tile_sums;
    float highest = NEVER;
    if (mine && i >= 0) {
      if (i == 0) raise_maximum(scores, scale, s);  // from NEVER
      highest = write_probabilities(scores, scale, s, tile_sums);
    } else if (!mine && i + 1 < piece.tiles) {
      barrier_wait(shared_address(&s.full[next.stage]), next.phase);
      score(s, next.stage, scores);
      if ((piece.begin + i + 2) * TOKENS > seen_by_all) mask(scores, piece.begin + i + 1, s);
    }
    settle(acc);  // of the tile before, which ran on beside the above
    if (i < 0) continue;
    barrier_wait(shared_address(&s.full[turn.stage]), turn.phase);
    ValueProduct product(s, turn.stage);
    // The maximum is only a reference point: any value that keeps exp2 in fp16's range gives the same result. So it is
    // raised only when a score exceeds it by HEADROOM: rare after the first tile, and elsewhere one vote.
    if (sync_threads_or<1, COMPUTE_THREADS>(highest > HEADROOM)) {
      if (mine) {
        raise_maximum(scores, scale, s);
        write_probabilities(scores, scale, s, tile_sums);
      }
      sync_threads<1, COMPUTE_THREADS>();
      shrink(acc, sums, s);
    }
#pragma unroll
    for (int k = 0; k < Sums::COUNT; ++k) sums.value[k] += tile_sums.value[k];
    product.accumulate(s, i & 1, acc);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.empty[turn.stage]));
    turn = next;
  }
  settle(acc);
  write_result(p, piece, acc, sums, s);
  return turn;
}

// Finds every block's part of the work once for all calls at the same lengths: the layers of a step.
extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_fp8_sm90_plan(const __grid_constant__ Params p) {
  __shared__ SpanMemory memory;
  const Span span = find_span(p, memory);
  if (threadIdx.x == 0) p.spans[blockIdx.x] = span;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_fp8_sm90_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    s.query_max = 0;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&s.full[i]), COPY_THREADS / 32);
      barrier_init(shared_address(&s.empty[i]), COMPUTE_THREADS / 32);
    }
    fence_for_engines();
  }
  __syncthreads();
  wait_for_primary();
  launch_dependents();
  Span span = p.planned ? load_span(p) : find_span(p, s.span);
  Piece piece;
  if (threadIdx.x >= COMPUTE_THREADS) {
    give_registers<COPY_REGISTERS>();
    Turn turn;
    while (next_piece(p, span, piece)) turn = copy_piece(p, piece, turn, s);
  } else {
    take_registers<COMPUTE_REGISTERS>();
    Turn turn;
    while (next_piece(p, span, piece)) turn = compute_piece(p, piece, turn, s);
  }
}

// ---- joining what several blocks computed of one query row ----------------------------------------------------------

constexpr int COMBINE_THREADS = 256, BATCH = 4;  // threads at most; partial results that a thread loads at once

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

// Where nothing was cut, all that is still to write are the tokens that see nothing, for want of a request or of keys.
__device__ inline void write_unseen(const Params& p) {
  constexpr float NOTHING[8] = {};
  for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const Request r = load_request(p, request_of(p, token));
    if (token - r.first_token < r.tokens && r.kv_len > 0) continue;
    const i64 row = static_cast<i64>(token) * p.heads;
    for (int i = threadIdx.x; i < p.heads * LATENT / 8; i += blockDim.x) store_eight(p, row * LATENT + 8 * i, NOTHING);
    for (int i = threadIdx.x; i < p.heads; i += blockDim.x) p.lse[row + i] = -infinity();
  }
}

// Joins 512 / gridDim.y latents of every gridDim.x-th query row. Groups of threads take every n-th partial result.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) mla_fp8_sm90_combine(const __grid_constant__ Params p) {
  __shared__ Mean shared[COMBINE_THREADS];
  const int lanes = LATENT / 4 / gridDim.y, groups = blockDim.x / lanes;
  const int four = blockIdx.y * lanes + threadIdx.x % lanes;  // of the 128 in a row
  for (int out_row = blockIdx.x; out_row < p.tokens * p.heads; out_row += gridDim.x) {
    const int token = out_row / p.heads, request = request_of(p, token);
    const Request r = load_request(p, request);
    const int row = out_row - r.first_token * p.heads;
    const int kv_tiles = row < r.tokens * p.heads ? r.kv_tiles() : 0;  // a token of no request is one of an empty one
    wait_for_primary();
    const Schedule schedule = {p.first[p.batch], p.first[p.batch + 1]};
    if (schedule.quota == UNCUT) {
      if (blockIdx.y == 0) write_unseen(p);
      return;
    }
    const int item = p.first[request] + row / ROWS * schedule.item_tiles(kv_tiles);
    const Parts parts(schedule.quota, item, kv_tiles);
    if (parts.count == 1) continue;  // written by its only block

    Mean mean;
    for (int i = threadIdx.x / lanes; i < parts.count; i += BATCH * groups) {
      float lse[BATCH];
      uint2 v[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const i64 at = static_cast<i64>(parts.slot(min(i + k * groups, parts.count - 1))) * ROWS + row % ROWS;
        lse[k] = i + k * groups < parts.count ? p.partial_lse[at] : -infinity();
        v[k] = reinterpret_cast<const uint2*>(p.partial + at * LATENT)[four];
      }
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const float2 low = unpack_f16x2(v[k].x), high = unpack_f16x2(v[k].y);
        mean.add(lse[k], 1.f, make_float4(low.x, low.y, high.x, high.y));
      }
    }
    __syncthreads();  // `shared` has been read for the row before
    shared[threadIdx.x] = mean;
    __syncthreads();
    if (threadIdx.x >= lanes) continue;
    for (int i = threadIdx.x + lanes; i < blockDim.x; i += lanes)
      mean.add(shared[i].reference, shared[i].total, shared[i].sum);
    const float factor = mean.total == 0.f ? 0.f : p.value_scale / mean.total;
    const float4 sum = mean.sum;
    store_four(p, static_cast<i64>(out_row) * LATENT + 4 * four, sum.x * factor, sum.y * factor, sum.z * factor,
               sum.w * factor);
    if (blockIdx.y == 0 && threadIdx.x == 0)
      p.lse[out_row] = (mean.total == 0.f ? -infinity() : mean.reference + log2f(mean.total)) * p.lse_scale;
  }
}
