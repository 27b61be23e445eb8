// A tile in shared memory, and the two products over it.
#pragma once
#include "mla_fp8_sm90_schedule.cuh"

constexpr int STRIDE = WIDTH + 32;              // of a pool row in shared memory: see `shuffled`
constexpr int COLUMNS = ROWS / 8;               // blocks of 8 columns of a wgmma, which are the tile's query rows
constexpr int LATENT_BLOCKS = LATENT / 2 / 64;  // blocks of 64 latents, for each computing warpgroup

// Registers of a warpgroup's products. A thread has of each block of 8 columns 2 * (lane % 4) and the next, of each 16
// rows lane / 4 (elements 0 and 1) and that + 8 (elements 2 and 3).
using Scores = float[ROWS / 2];                       // 64 places of a tile by ROWS query rows
using Accumulators = float[LATENT_BLOCKS][ROWS / 2];  // 256 latents by ROWS query rows

struct alignas(128) Shared {
  unsigned char kv[STAGES][TOKENS * STRIDE];
  u32 q[WIDTH / 16][2][COLUMNS][8][4];           // pairs of fp16 in wgmma's core matrices, see load_query
  u32 p[2][TOKENS / 8][COLUMNS][8][4];           // the same for the probabilities of an even and an odd tile
  float warp_value[COMPUTE_THREADS / 32][ROWS];  // one number a warp and column
  float maximum[ROWS], factor[ROWS];             // a column's reference point; what its results are multiplied by
  int limit[ROWS];                               // how many tokens a column sees
  u64 full[STAGES], empty[STAGES];               // barriers: a pool tile has been copied, has been used
  u32 query_max;  // the bits of the query's largest value
  SpanMemory span;
};

// Place -> token within each 8 tokens of a tile. Half a warp reads 32 bytes each of four tokens: those of four
// neighbouring places for the scores, of four even or four odd places for the values. In this order either four differ
// modulo 4, and with rows 608 bytes apart (96 modulo 128) they lie in different banks.
__device__ inline int shuffled(int place) { return 0x57463120 >> (4 * place) & 7; }

// A position in the ring of pool tiles.
struct Turn {
  int stage = 0;
  u32 phase = 0;

  __device__ Turn next() const { return stage + 1 < STAGES ? Turn{stage + 1, phase} : Turn{0, phase ^ 1}; }
};

// Each computing warp brings 8 rows of Q, and of those every SHARE-th block of 64 values: it looks its rows up once.
constexpr int SHARE = 8 / COLUMNS, QUERY_BLOCKS = (WIDTH / 64 + SHARE - 1) / SHARE;
using QueryPart = u32[QUERY_BLOCKS][8];  // a thread's pairs of values: eight in a row, and the same 32 further, a block

__device__ inline int query_block(int i) { return i * SHARE + (SHARE == 1 ? 0 : threadIdx.x / 32 / COLUMNS); }

// Stores a thread's part of Q, multiplied by a power of two, as fp16.
template <int Type>
__device__ inline void store_query(const QueryPart& pairs, float scale, Shared& s) {
  const int column = threadIdx.x / 32 % COLUMNS, row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const u32 scales = pack_bf16x2(scale, scale);
#pragma unroll
  for (int i = 0; i < QUERY_BLOCKS; ++i) {
    const int block = query_block(i);
    if (block >= WIDTH / 64) continue;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float2 v;
      if constexpr (Type == BF16) {
        v = unpack_bf16x2(multiply_bf16x2(pairs[i][k], scales));
      } else {
        v = unpack_f16x2(pairs[i][k]);
        v.x *= scale, v.y *= scale;
      }
      s.q[block * 4 + k / 2][k % 2][column][row][quad] = pack_f16x2(v.x, v.y);
    }
  }
}

// Brings Q to shared memory. The order of k within a dot product is free, so in `score` a thread holds 8 neighbouring
// values of a token, as it reads them, which are two k-steps; Q is stored to match. It is multiplied by a power of two
// that brings its largest value near 2^15: a bf16 query may exceed fp16's range. Returns the factor that turns a dot
// product into a base-2 logit.
__device__ inline float load_query(const Params& p, const Piece& piece, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_in_block = lane / 4, quad = lane % 4;
  const int row = 8 * (warp % COLUMNS) + row_in_block, row_of_request = piece.first_row + row;
  const i64 token = piece.request.first_token + row_of_request / p.heads, head = row_of_request % p.heads;
  const unsigned short* nope = p.q_nope + token * p.q_nope_token + head * p.q_nope_head + 8 * quad;
  const unsigned short* rope = p.q_rope + token * p.q_rope_token + head * p.q_rope_head + 8 * quad;
  QueryPart pairs;
#pragma unroll
  for (int i = 0; i < QUERY_BLOCKS; ++i) {
    const int block = query_block(i);
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    if (block < WIDTH / 64 && row < piece.rows) {
      const unsigned short* q = block < 8 ? nope + 64 * block : rope;
      a = *reinterpret_cast<const uint4*>(q);
      b = *reinterpret_cast<const uint4*>(q + 32);
    }
    pairs[i][0] = a.x, pairs[i][1] = a.y, pairs[i][2] = a.z, pairs[i][3] = a.w;
    pairs[i][4] = b.x, pairs[i][5] = b.y, pairs[i][6] = b.z, pairs[i][7] = b.w;
  }
  // Without their signs, bf16 and fp16 alike are in the order of their bits.
  u32 two = 0;
#pragma unroll
  for (int i = 0; i < QUERY_BLOCKS; ++i)
#pragma unroll
    for (int k = 0; k < 8; ++k) two = max_u16x2(two, pairs[i][k] & 0x7fff7fffu);
  const u32 largest = __reduce_max_sync(~0u, max(two & 0xffffu, two >> 16));
  if (lane == 0) atomicMax(&s.query_max, largest);
  sync_threads<1, COMPUTE_THREADS>();
  const int exponent = static_cast<int>(p.q_type == FP16 ? (s.query_max >> 10) - 15 : (s.query_max >> 7) - 127);
  const int shift = exponent == 128 ? 0 : min(14 - exponent, 126);  // an infinite or NaN query stays one
  const float scale = __uint_as_float(static_cast<u32>(127 + shift) << 23);
  p.q_type == FP16 ? store_query<FP16>(pairs, scale, s) : store_query<BF16>(pairs, scale, s);
  fence_for_engines();
  sync_threads<1, COMPUTE_THREADS>();
  if (threadIdx.x == 0) s.query_max = 0;  // for the next piece
  return p.score_scale * LOG2E / scale;
}

// scores = K Q^T.
__device__ inline void score(const Shared& s, int stage, Scores& scores) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const unsigned char* upper = &s.kv[stage][(16 * warp + shuffled(lane / 4)) * STRIDE + 8 * (lane % 4)];
  const Operands<COLUMNS> q(&s.q);
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) scores[i] = 0.f;
  u32 a[2][2][4];  // two pairs of k-steps: one being read by the tensor cores, one being converted
  uint2 words[3][2];           // of three pairs, read two ahead
  auto read = [&](int pair) {
    words[pair % 3][0] = *reinterpret_cast<const uint2*>(upper + 32 * pair);
    words[pair % 3][1] = *reinterpret_cast<const uint2*>(upper + 8 * STRIDE + 32 * pair);
  };
  read(0);
  read(1);
#pragma unroll
  for (int pair = 0; pair < WIDTH / 32; ++pair) {
    if (pair + 2 < WIDTH / 32) read(pair + 2);
    u32(&now)[2][4] = a[pair % 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 upper_words = words[pair % 3][0], lower_words = words[pair % 3][1];
      const u32 u = i ? upper_words.y : upper_words.x, l = i ? lower_words.y : lower_words.x;
      now[i][0] = e4m3x2_lo(u);
      now[i][1] = e4m3x2_lo(l);
      now[i][2] = e4m3x2_hi(u);
      now[i][3] = e4m3x2_hi(l);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) wgmma<0>(scores, now[i], q.at(2 * pair + i));
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  pin(scores);
}

// One k-step (16 places) of V^T for this warpgroup's 256 latents. A thread reads 8 neighbouring latents of four tokens
// and transposes 4 x 4 bytes at a time: latent 2 * b + h of the 8 is row (lane / 4) + 8 * h of 64-latent block b.
struct ValueReader {
  const unsigned char *even, *odd;
  uint2 words[4];

  __device__ ValueReader(const Shared& s, int stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned char* column = &s.kv[stage][64 * warp + 8 * (lane / 4)];
    even = column + shuffled(2 * (lane % 4)) * STRIDE;
    odd = column + shuffled(2 * (lane % 4) + 1) * STRIDE;
    read(0);
  }
  __device__ void read(int step) {
    auto at = [&](const unsigned char* place) { return *reinterpret_cast<const uint2*>(place + 16 * step * STRIDE); };
    words[0] = at(even), words[1] = at(odd), words[2] = at(even + 8 * STRIDE), words[3] = at(odd + 8 * STRIDE);
  }
  __device__ void convert(u32 (&a)[LATENT_BLOCKS][4]) const {
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

// A warpgroup's part of the product of a tile's values and probabilities. It is prepared before the probabilities are
// there; the tensor cores are still at its last k-step when `accumulate` returns.
struct ValueProduct {
  ValueReader reader;
  u32 a[2][LATENT_BLOCKS][4];  // two k-steps: one being read by the tensor cores, one being converted

  __device__ ValueProduct(const Shared& s, int stage) : reader(s, stage) {
    reader.convert(a[0]);
    reader.read(1);
  }
  // acc += V^T P^T
  __device__ void accumulate(const Shared& s, int parity, Accumulators& acc) {
    const Operands<COLUMNS> p(&s.p[parity]);
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step) {
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < LATENT_BLOCKS; ++b) wgmma<1>(acc[b], a[step % 2][b], p.at(step));
      wgmma_commit();
      wgmma_wait<1>();
      if (step + 1 < TOKENS / 16) reader.convert(a[(step + 1) % 2]);
      if (step + 2 < TOKENS / 16) reader.read(step + 2);
    }
  }
};

// Waits for the tensor cores to be done with the accumulators.
__device__ inline void settle(Accumulators& acc) {
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < LATENT_BLOCKS; ++b) pin(acc[b]);
}
