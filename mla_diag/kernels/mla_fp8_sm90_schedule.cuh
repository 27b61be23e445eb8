// What mla_fp8_sm90.cu works on: its parameters, and which part of the work is whose.
#pragma once
#include "mla_fp8_sm90_ptx.cuh"

constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int TOKENS = 64;  // of one KV tile: the 64 rows of one wgmma
constexpr int COMPUTE_THREADS = 256, COPY_THREADS = 128, THREADS = COMPUTE_THREADS + COPY_THREADS;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int PIECE_COST = 4;  // what a second piece costs a block, in tiles

enum Type { BF16, FP16, FP32 };

// As mla_fp8_sm90.py passes them; qo_indptr and one of kv_indptr and kv_lens may be null.
struct Params {
  const unsigned short *q_nope, *q_rope;  // bf16 or fp16
  const unsigned char* pool;
  void* out;                              // [tokens, heads, 512]
  float* lse;                             // [tokens, heads]
  float* partial;                         // [2 * blocks, ROWS, 512], divided by the sums of their own probabilities
  float* partial_lse;                     // [2 * blocks, ROWS], base 2
  int* schedule;                          // [batch + 2]: where each request's first item starts; a Schedule
  const int *qo_indptr, *kv_indptr, *kv_lens, *pages;
  i64 q_nope_token, q_nope_head, q_rope_token, q_rope_head, pool_row, pages_row;  // strides, in elements
  int batch, heads, page_size, causal, q_type, out_type, blocks;
  float score_scale, value_scale, lse_scale;
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

// A run of KV tiles of one (request, row tile).
struct Piece {
  Request request;
  int first_row, rows;           // query rows (token x head) of the row tile
  int begin, tiles;              // KV tiles
  float *partial, *partial_lse;  // where the result goes; partial is null when it is the final one

  // How many tokens a query row sees. Later rows see no fewer.
  __device__ int visible(const Params& p, int row) const {
    if (!p.causal) return request.kv_len;
    return request.kv_len - request.tokens + 1 + min(row / p.heads, request.tokens - 1);
  }
};

// ---- the span of tiles that a block works on ------------------------------------------------------------------------

// An item is a (request, row tile) with tokens to see. All items are laid end to end and cut every `quota` tiles. Cut
// evenly, most blocks get the end of one item and the start of the next, and pay twice for a query and a result. So
// when lengths are about equal each item is padded to `padded` tiles, and a quota is a whole part of one item or, with
// more items than blocks, a number of whole items, which then need no combining.
struct Schedule {
  int quota, padded;

  __device__ Schedule(int blocks, int items, int total, int longest) : quota((total + blocks - 1) / blocks), padded(0) {
    if (items == 0) return;
    const int parts = max(1, blocks / items), part = (longest + parts - 1) / parts;
    const int aligned = part * ((items + blocks - 1) / blocks);
    if (aligned > quota + PIECE_COST) return;
    quota = aligned;
    padded = (longest + part - 1) / part * part;
  }
  __device__ explicit Schedule(const int* stored) : quota(stored[0]), padded(stored[1]) {}

  __device__ void store(int* to) const { to[0] = quota, to[1] = padded; }
  __device__ int item_tiles(int kv_tiles) const { return kv_tiles && padded ? padded : kv_tiles; }
};

// The blocks that worked on an item, each of which left its part in a slot of the partial results: in its even slot if
// it was the block's first piece, in its odd slot if it was the last.
struct Parts {
  int quota, begin, first_block, count;

  __device__ Parts(const Schedule& schedule, int begin, int kv_tiles) : quota(schedule.quota), begin(begin) {
    first_block = kv_tiles ? begin / quota : 0;
    count = kv_tiles ? (begin + kv_tiles - 1) / quota - first_block + 1 : 0;
  }
  __device__ int slot(int part) const {
    const int block = first_block + part;
    return 2 * block + (block * quota < begin);
  }
};

struct Span {
  Schedule schedule;
  int request, offset, tiles;
};

// What the threads of a block share in find_span.
struct SpanMemory {
  int3 warp_total[THREADS / 32];
  int request, offset;
};

// Lengths are only known on the device, so every block reads them all and finds its own span.
__device__ inline Span find_span(const Params& p, SpanMemory& s) {
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
    const int items_below = __shfl_up_sync(~0u, items_upto, distance);
    const int tiles_below = __shfl_up_sync(~0u, tiles_upto, distance);
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
    if (first <= start && start < next) s.request = i, s.offset = start - first;
    if (blockIdx.x == 0) p.schedule[i] = first;
    first = next;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) schedule.store(p.schedule + p.batch);
  __syncthreads();
  return {schedule, s.request, s.offset, max(0, min(schedule.quota, total - start))};
}

// Calls `work` with each piece of a span.
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
