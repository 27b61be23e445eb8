// What mla_fp8_sm90.cu works on: its parameters, and which part of the work is whose.
#pragma once
#include "mla_fp8_sm90_ptx.cuh"

constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int TOKENS = 64;  // of one KV tile: the 64 rows of one wgmma
constexpr int COMPUTE_THREADS = 256, COPY_THREADS = 128, THREADS = COMPUTE_THREADS + COPY_THREADS;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int PIECE_COST = 4;   // what a second piece costs a block, in tiles
constexpr int UNCUT = 1 << 30;  // the quota where items are whole: one that none exceeds

enum Type { BF16, FP16, FP32 };

struct Request {
  int first_token, tokens, kv_len;
  i64 start;  // of its pages among all

  __device__ int row_tiles(int heads) const { return (tokens * heads + ROWS - 1) / ROWS; }
  __device__ int kv_tiles() const { return (kv_len + TOKENS - 1) / TOKENS; }
};

// What is left of a block's part of the work: `left` tiles from `offset` in `request` on, with items of `padded` tiles
// if that is not zero; or, where `request` is below zero, whole items: `left` from number `offset` of the list on.
struct alignas(16) Span {
  int request, offset, left, padded;
  Request now;  // the one it stands at, if its items are not whole
};

// As mla_fp8_sm90.py passes them; qo_indptr and one of kv_indptr and kv_lens may be null.
struct Params {
  const unsigned short *q_nope, *q_rope;  // bf16 or fp16
  const unsigned char* pool;
  void* out;                              // [tokens, heads, 512]
  float* lse;                             // [tokens, heads]
  unsigned short* partial;                // [2 * blocks, ROWS, 512] fp16, averages of pool numbers: at most 448
  float* partial_lse;                     // [2 * blocks, ROWS], base 2
  Span* spans;                            // [blocks], if planned: made by mla_fp8_sm90_plan at these lengths
  int2* items;                            // [blocks, block_items]: (request, row tile) of whole items
  int* first;                             // [batch + 2]: where each request's first item starts; quota; padded
  const int *qo_indptr, *kv_indptr, *kv_lens, *pages;
  i64 q_nope_token, q_nope_head, q_rope_token, q_rope_head, pool_row, pages_row;  // strides, in elements
  int tokens, batch, heads, page_size, causal, q_type, out_type, blocks, block_items, planned;
  float score_scale, value_scale, lse_scale;
};

__device__ inline Request load_request(const Params& p, int request) {
  Request r;
  r.first_token = p.qo_indptr ? p.qo_indptr[request] : request;
  r.tokens = p.qo_indptr ? p.qo_indptr[request + 1] - r.first_token : 1;
  r.start = p.kv_indptr ? p.kv_indptr[request] : request * p.pages_row;
  r.kv_len = p.kv_lens ? p.kv_lens[request] : p.kv_indptr[request + 1] - static_cast<int>(r.start);
  return r;
}

// A run of KV tiles of one (request, row tile).
struct Piece {
  Request request;
  int first_row, rows;           // query rows (token x head) of the row tile
  int begin, tiles;              // KV tiles
  unsigned short* partial;       // where the result goes; null when it is the final one
  float* partial_lse;

  // How many tokens a query row sees. Later rows see no fewer.
  __device__ int visible(const Params& p, int row) const {
    if (!p.causal) return request.kv_len;
    return request.kv_len - request.tokens + 1 + min(row / p.heads, request.tokens - 1);
  }
};

// ---- the span of tiles that a block works on ------------------------------------------------------------------------

// All that there is to do.
struct Work {
  int items, tiles, unseen, longest;  // tiles of all items; those of them that no row of their item sees; of one item

  __device__ void add(const Params& p, const Request& r) {
    const int kv_tiles = r.kv_tiles(), row_tiles = r.row_tiles(p.heads);
    if (kv_tiles == 0 || row_tiles == 0) return;
    items += row_tiles, tiles += row_tiles * kv_tiles, longest = max(longest, kv_tiles);
    // The last row tile sees all, the first all but the other tokens: on average half of them are not seen.
    if (p.causal) unseen += static_cast<i64>(row_tiles) * (r.tokens - 1) / (2 * TOKENS);
  }
};

__device__ inline int padded_tiles(int kv_tiles, int padded) { return kv_tiles && padded ? padded : kv_tiles; }

// An item is a (request, row tile) with tokens to see. All items are laid end to end and cut every `quota` tiles. Cut
// evenly, most blocks get the end of one item and the start of the next, and pay twice for a query and a result. So
// when lengths are about equal each item is padded to `padded` tiles, a multiple of the quota, and no block gets two.
// Where blocks are too few for two an item, each gets up to `whole` items and nothing is cut or combined, unless some
// blocks would then have much more to do than others. Even cuts are not even in extend, where early rows see less.
struct Schedule {
  int quota, padded, whole;

  __device__ static Schedule of(int blocks, const Work& work) {
    const Schedule even = {(work.tiles + blocks - 1) / blocks, 0, 0};
    if (work.items == 0) return even;
    const int parts = blocks / work.items;
    if (parts <= 1) {
      const int each = (work.items + blocks - 1) / blocks;
      const float seen = static_cast<float>(work.tiles - work.unseen) / work.tiles;
      if (each * work.longest * seen > even.quota + PIECE_COST) return even;
      return {UNCUT, 0, each};
    }
    const int part = (work.longest + parts - 1) / parts;
    if (part > even.quota + PIECE_COST) return even;
    return {part, (work.longest + part - 1) / part * part, 0};
  }

  __device__ int item_tiles(int kv_tiles) const { return padded_tiles(kv_tiles, padded); }
};

// The blocks that worked on an item, each of which left its part in a slot of the partial results. A block has two
// slots: the end of an item, with which it may have begun, is in the even one, the start of another in the odd one.
struct Parts {
  int first_block, count;

  __device__ Parts(int quota, int begin, int kv_tiles) {
    first_block = kv_tiles ? begin / quota : 0;
    count = kv_tiles ? (begin + kv_tiles - 1) / quota - first_block + 1 : 0;
  }
  __device__ static int slot(int block, bool start) { return 2 * block + start; }
  __device__ int slot(int part) const { return slot(first_block + part, part == 0); }
};

// What the threads of a block share in find_span.
struct SpanMemory {
  Work warp_total[THREADS / 32];
  Span span;
};

// Where a block's whole items are in the order of all: neighbouring blocks have neighbouring items at the same time, so
// that what one reads of a request the others find in L2; every other round goes backwards, because later items of a
// request are longer in extend.
struct Rounds {
  int items, width;

  __device__ Rounds(const Schedule& schedule, int items)
      : items(items), width((items + schedule.whole - 1) / schedule.whole) {}

  __device__ int item(int round, int block) const { return round * width + (round % 2 ? width - 1 - block : block); }
  __device__ int count(int block) const {
    if (block >= width) return 0;
    const int full = items / width;
    return full + (item(full, block) < items);
  }
  // Adds those of the block's items to its list that are of a request, which begin with number `first`.
  __device__ void list(int block, int request, int first, int row_tiles, int2* to) const {
#pragma unroll 1
    for (int round = 0; round < count(block); ++round) {
      const int row_tile = item(round, block) - first;
      if (0 <= row_tile && row_tile < row_tiles) to[round] = {request, row_tile};
    }
  }
};

// Lengths are only known on the device, so a block reads them all to find its own span.
__device__ inline Span find_span(const Params& p, SpanMemory& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (p.batch + THREADS - 1) / THREADS;
  const int begin = min(static_cast<int>(threadIdx.x) * each, p.batch), end = min(begin + each, p.batch);
  Work own = {};
#pragma unroll 1
  for (int i = begin; i < end; ++i) own.add(p, load_request(p, i));
  int items_upto = own.items, tiles_upto = own.tiles;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int items_below = __shfl_up_sync(~0u, items_upto, distance);
    const int tiles_below = __shfl_up_sync(~0u, tiles_upto, distance);
    if (lane >= distance) items_upto += items_below, tiles_upto += tiles_below;
  }
  const int unseen = __reduce_add_sync(~0u, own.unseen), longest = __reduce_max_sync(~0u, own.longest);
  if (lane == 31) s.warp_total[warp] = {items_upto, tiles_upto, unseen, longest};
  __syncthreads();
  Work all = {};
  int items_before = items_upto - own.items, tiles_before = tiles_upto - own.tiles;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) {
    const Work total = s.warp_total[i];
    if (i < warp) items_before += total.items, tiles_before += total.tiles;
    all.items += total.items, all.tiles += total.tiles, all.unseen += total.unseen;
    all.longest = max(all.longest, total.longest);
  }
  const Schedule schedule = Schedule::of(p.blocks, all);
  const int block = blockIdx.x;
  const int total = schedule.padded ? all.items * schedule.padded : all.tiles;
  const i64 start = static_cast<i64>(block) * schedule.quota;
  int first = schedule.padded ? items_before * schedule.padded : tiles_before;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const Request r = load_request(p, i);
    const int row_tiles = r.kv_tiles() ? r.row_tiles(p.heads) : 0;
    const int next = first + row_tiles * schedule.item_tiles(r.kv_tiles());
    if (schedule.whole)
      Rounds(schedule, all.items).list(block, i, items_before, row_tiles, p.items + block * p.block_items);
    else if (first <= start && start < next)
      s.span = {i, static_cast<int>(start) - first, min(schedule.quota, total - static_cast<int>(start)),
                schedule.padded, r};
    if (block == 0) p.first[i] = first;
    first = next, items_before += row_tiles;
  }
  if (threadIdx.x == 0) {
    if (schedule.whole)
      s.span = {-1, block * p.block_items, Rounds(schedule, all.items).count(block), 0, {}};
    else if (start >= total)
      s.span = {};
    if (block == 0) p.first[p.batch] = schedule.quota, p.first[p.batch + 1] = schedule.padded;
  }
  __syncthreads();
  return s.span;
}

// The span that mla_fp8_sm90_plan found, which has not been told how far the rows of a page table lie apart.
__device__ inline Span load_span(const Params& p) {
  Span span = p.spans[blockIdx.x];
  if (!p.kv_indptr) span.now.start = span.request * p.pages_row;
  return span;
}

// Gives the next piece of a span, or returns false at its end.
__device__ inline bool next_piece(const Params& p, Span& span, Piece& piece) {
  int row_tile, kv_tiles, tiles;
  do {
    if (span.left <= 0) return false;
    if (span.request < 0) {
      const int2 item = p.items[span.offset++];
      --span.left;
      span.now = load_request(p, item.x);
      piece.begin = 0, row_tile = item.y, tiles = kv_tiles = span.now.kv_tiles();
      break;
    }
    kv_tiles = span.now.kv_tiles();
    const int item_tiles = padded_tiles(kv_tiles, span.padded);
    if (span.offset >= span.now.row_tiles(p.heads) * item_tiles) {
      span.now = load_request(p, ++span.request), span.offset = 0, tiles = 0;
      continue;
    }
    row_tile = span.offset / item_tiles, piece.begin = span.offset % item_tiles;
    const int taken = min(item_tiles - piece.begin, span.left);
    tiles = min(kv_tiles - piece.begin, taken);  // the rest is padding
    span.offset += taken, span.left -= taken;
  } while (tiles <= 0);
  piece.request = span.now;
  piece.first_row = row_tile * ROWS;
  piece.rows = min(ROWS, piece.request.tokens * p.heads - piece.first_row);
  const int seen_by_any = piece.visible(p, piece.first_row + piece.rows - 1);
  piece.tiles = max(0, min(piece.begin + tiles, (seen_by_any + TOKENS - 1) / TOKENS) - piece.begin);
  const int slot = Parts::slot(blockIdx.x, piece.begin == 0);
  piece.partial = tiles == kv_tiles ? nullptr : p.partial + static_cast<i64>(slot) * ROWS * LATENT;
  piece.partial_lse = p.partial_lse + slot * ROWS;
  return true;
}
